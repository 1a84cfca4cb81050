"""`draftgate load`: a closed or open loop of requests on any server that speaks OpenAI's API."""
