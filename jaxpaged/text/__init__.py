"""Text in and out: conversations, chat templates, vocabularies and detokenization."""
