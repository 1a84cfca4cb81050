"""Which of the known causes explains a drafter that is not accepted, or does not pay.

Symptoms and checkpoint in; a verdict per cause out, each with the evidence it rests on, and the next cheapest test.

The causes are a reviewed table (`causes.toml`); what excludes and confirms each is in `loading.py`, `feeding.py` and
`figures.py`.
"""
