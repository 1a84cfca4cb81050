"""Acceptance, throughput and losslessness: raw counts from running endpoints, and the statistics that judge them."""
