"""Decode attention: few query tokens a sequence, bound by memory."""
