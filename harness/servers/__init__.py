"""The life of an engine server: launch, watch, log, tear down. It imports nothing, for the guardian imports it."""
