"""The privacy that a run with clipped updates and Gaussian noise has spent, by the package `dp-accounting`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

# Of the Renyi divergences. More of them take a tenth of a second a round, and change the third digit at most.
_ORDERS = (*range(2, 33), 48, 64, 128)


def require_accountant() -> None:
    """Raises ValueError where the accountant is not installed."""
    if find_spec("dp_accounting") is None:
        raise ValueError(
            "server.transforms.delta: got one, but the package that accounts for privacy is not installed: pip install "
            "dp-accounting; or leave delta out, for noise without an account"
        )


def epsilon(multiplier: float, rounds: Sequence[int], population: int, delta: float) -> float:
    """The epsilon, at `delta`, of the models of all rounds, `rounds[k]` of which had k clients.

    Of `population` clients, k are drawn without replacement, their updates clipped and summed, and noise of standard
    deviation `multiplier * clip norm` added. Neighbours differ in the data of one client, whose update then moves the
    sum by at most twice the clip norm; who is drawn, and how many, does not depend on the data. Renyi differential
    privacy of sampling without replacement: Y.-X. Wang, B. Balle, S. Kasiviswanathan, "Subsampled Renyi Differential
    Privacy and Analytical Moments Accountant", AISTATS 2019.
    """
    import dp_accounting  # type: ignore[import-not-found, unused-ignore]
    from dp_accounting.rdp import RdpAccountant  # type: ignore[import-not-found, unused-ignore]

    accountant = RdpAccountant(_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    round_of_all = dp_accounting.GaussianDpEvent(multiplier / 2)
    for num_clients, count in enumerate(rounds):
        if num_clients and count:
            event = dp_accounting.SampledWithoutReplacementDpEvent(population, num_clients, round_of_all)
            accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))
