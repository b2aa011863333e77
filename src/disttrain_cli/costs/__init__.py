"""What things cost, as plain numbers: the models in a profile, evaluated. No measuring, no torch.

Start with `stage` (time of layers) and `memory` (peak bytes); `freezing` says what a backward does,
`links` what messages take, `flops` has model FLOPs and MFU, `hardware` the figures and efficiency
curves of known devices.
"""
