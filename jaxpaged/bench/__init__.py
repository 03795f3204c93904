"""Load for any OpenAI-compatible server, and what it makes of it: `jaxpaged bench serve`."""
