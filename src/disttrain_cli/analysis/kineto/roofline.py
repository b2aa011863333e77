"""Roofline model of operators against their device's peak (Williams et al. 2009)."""

from __future__ import annotations

from typing import Any, Literal

from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.result.devices import OperatorRow
from disttrain_cli.costs.hardware import Device, Precision, lookup
from disttrain_cli.errors import SpecError

#: Types whose peak is in the catalogue.
_PRECISIONS: dict[str, Precision] = {
    "bfloat16": "bf16",
    "half": "bf16",
    "float16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}


def operators(database: KinetoDatabase) -> list[OperatorRow]:
    """Return the rows of `operator_rows.sql` with the roof of the traces' one kind of device."""
    rows = database.answer("operator_rows")
    device = _device(database) if rows else None
    return [OperatorRow(**row, **_roof(device, row)) for row in rows]


def _device(database: KinetoDatabase) -> Device | None:
    """Return the catalogue's device; None for an unknown name or several devices."""
    names = database.sql("SELECT DISTINCT name FROM devices")
    if len(names) != 1:
        return None
    try:
        return lookup(names[0]["name"])
    except SpecError:
        return None


def _roof(device: Device | None, row: dict[str, Any]) -> dict[str, Any]:
    """Return `roof_tflops` and `bound` of an operator."""
    precision = _PRECISIONS.get(row["dtype"] or "")
    if device is None or precision is None or row["flops_per_byte"] is None:
        return {"roof_tflops": None, "bound": None}
    peak, slope = device.peak_of(precision), device.memory_gbytes_s * row["flops_per_byte"] / 1e3
    bound: Literal["compute", "memory"] = "compute" if peak <= slope else "memory"
    return {"roof_tflops": min(peak, slope), "bound": bound}
