"""disttrain: disaggregated training of multimodal LLMs (DistTrain, SIGCOMM 2025).

Start reading at `app.py` (the commands), `spec/` (the artefacts that pass between them) and
`docs/architecture.md` (which room holds what).
"""

__version__ = "0.1.0"
