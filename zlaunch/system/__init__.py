"""Ask the operating system: processes, devices, networks, and the events that describe them."""
