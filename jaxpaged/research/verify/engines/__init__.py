"""Judge of whole engines: histories of requests to a server or an adapter, and what must hold."""
