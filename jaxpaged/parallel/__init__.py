"""One model on several devices: the only part that knows of devices in the plural."""
