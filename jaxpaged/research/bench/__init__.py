"""`jaxpaged bench`: load for any OpenAI-compatible server, or for the engine in this process."""
