"""Prices of devices, from the run file or a file that it names."""

from __future__ import annotations

from pydantic import RootModel

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.files import parse_yaml, validate
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.cluster import Price


class Prices(RootModel[dict[str, Price]]):
    """Devices with the price of one of each per hour."""


def read_prices(run: Run, device: str) -> dict[str, float]:
    """Return the hourly price by device, names in lower case, without `analytic:`.

    Args:
        device: the run's own, to which a single number refers.

    Raises:
        SpecError: the file that `cluster.price_per_gpu_hour` names is missing or wrong, or a device
            has two prices.
    """
    stated = run.file.cluster.price_per_gpu_hour
    if stated is None:
        return {}
    if isinstance(stated, float):
        return {device.lower(): stated}
    if isinstance(stated, str):
        path, what = run.resolve(stated), "price file (cluster.price_per_gpu_hour)"
        lines = parse_yaml(path, what, "Write lines such as 'H100: 2.5' into it.")
        stated = validate(Prices, lines, path, what).root
    prices: dict[str, float] = {}
    for name, price in stated.items():
        device = name.lower().removeprefix("analytic:")
        if device in prices:
            raise SpecError(
                f"cluster.price_per_gpu_hour has two prices of {name}",
                f"{prices[device]:g} and {price:g}",
                "Remove one of them.",
            )
        prices[device] = price
    return prices
