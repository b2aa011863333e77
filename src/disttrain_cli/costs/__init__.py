"""Cost models: the polynomials of a profile, evaluated to plain numbers. No measuring, no torch.

Start with `stage` (time of layers) and `memory` (peak bytes); `freezing` determines the type of
each layer's backward, `links` has times of messages, `flops` has model FLOPs and MFU, `hardware`
the figures and efficiency curves of known devices.
"""
