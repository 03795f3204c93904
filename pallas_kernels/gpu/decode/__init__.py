"""The kernel for decode attention: few query tokens a sequence, bound by memory."""
