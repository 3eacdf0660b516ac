"""Pretend to have a GPU: the runtime's own GPU code runs on CPU tensors that say they are on a GPU,
and every access to memory is checked for an order.

What runs on a GPU is asynchronous: streams work beside each other and beside the host, and the only order
between them is what events, waits and blocking calls make. Here each operation runs at once, so its result
never shows a missing wait. Instead, every operation's reads and writes are noted with a vector clock of who
made them (a stream or a host thread); two that touch the same bytes, one of them writing, must be ordered.

Found: races; memory given back while another stream uses it; operations that mix devices, which a real GPU
refuses; use of a GPU that is another rank's; and every place where the host waits for the device.

Not seen: kernels launched by CuPy (their torch twins run instead), autograd's own thread of a device, speed.
"""
