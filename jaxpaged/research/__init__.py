"""Tools for research on paged memory: verification, simulation, replay and learning."""
