"""Model FLOPs and MFU: counted operations over the devices' peak in the same time.

Forward plus backward that the step needs; padding does not count. A CPU's peak is the entire
machine's and counts once, however many ranks share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from disttrain_cli.calls import call
from disttrain_cli.costs.freezing import Backward, backwards
from disttrain_cli.costs.stage import NO_WORK
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.layer_costs import LayerCost, Polynomial
from disttrain_cli.spec.profile import DeviceProfile, Profile
from disttrain_cli.spec.work import Work


def module_flops(
    profile: Profile, name: str, work: Work, trained: Sequence[str] | None = None
) -> float:
    """Return the FLOPs of a module's forward and backward for this work, without recomputation.

    Args:
        trained: trained modules (`freezing.backwards`); None = all.
    """
    if work == NO_WORK:
        return 0.0
    module = profile.modules[name]
    does = Counter(zip(module.layers, backwards(profile, trained)[name], strict=True))
    return float(
        sum(
            count * part(work)
            for (kind, what), count in does.items()
            for part in flops_parts(module.costs[kind], what)
        )
    )


def flops_parts(cost: LayerCost, does: Backward) -> list[Polynomial]:
    """Return the FLOPs that add up to a layer's forward and backward."""
    if does == "still":
        return [cost.forward_flops]
    return [
        cost.forward_flops,
        cost.backward_flops if does == "trained" else cost.backward_input_flops,
    ]


def peak_tflops(device: DeviceProfile, gpus: int) -> float:
    """Return the peak of the devices of `gpus` ranks, in TFLOP/s."""
    return device.peak_tflops if device.kind == "cpu" else device.peak_tflops * gpus


def mfu(flops: float, seconds: float, device: DeviceProfile, gpus: int) -> float:
    """Return model FLOPs utilisation as a fraction.

    Raises:
        SpecError: it exceeds 1, so the peak (or the time) must be wrong.
    """
    peak = peak_tflops(device, gpus)
    value = flops / (seconds * peak * 1e12)
    if value > 1.0:
        raise SpecError(
            f"An MFU of {100 * value:.1f} % is impossible",
            f"{flops / 1e12:.4g} TFLOP in {seconds:.4g} s on a peak of {peak:.4g} TFLOP/s"
            f" ({device.name})",
            f"Correct cluster.peak_tflops and profile again: {call('profile')}",
        )
    return value
