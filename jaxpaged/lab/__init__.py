"""The laboratory: request traces replayed through this package's own allocator and prefix cache."""
