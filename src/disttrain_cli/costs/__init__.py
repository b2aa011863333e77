"""What things cost, as plain numbers: the models in a profile, evaluated. No measuring, no torch.

Start with `stage` (time of layers) and `memory` (peak bytes); `flops` has model FLOPs and MFU, `hardware`
the peaks of known devices.
"""
