"""Services: parts of an engine's turns that options bring, and what it does between two runs."""
