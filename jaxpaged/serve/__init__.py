"""An OpenAI-compatible server over `AsyncLLM`. But for `command` all is imported only when it is to run."""
