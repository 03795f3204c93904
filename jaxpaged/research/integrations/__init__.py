"""Integrations: classes that other libraries of training take an engine by."""
