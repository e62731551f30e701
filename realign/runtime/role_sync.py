"""Copy or average weights from a trained role into another one at the end of a step (`Sync`), across engines."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from realign.api import Model, Sync
from realign.engines.training.weights import check_weights, shapes_of
from realign.errors import ConfigError, RealignError
from realign.records.checkpoint.serialize import hash_of

VERIFIED = 2
"""Number of first copies to verify, per role and process."""


class RoleSync:
    """The weight syncs of a run.

    The first copies (weight 1) are verified: the sha256 over all weights of both roles must match. Weighted averages
    are not verified, because there is no reference to compare with.
    """

    def __init__(self, syncs: Mapping[str, Sync], models: Mapping[str, Model]) -> None:
        """Compare the weight names and shapes of the loaded roles.

        Raises:
            ConfigError: the weights of two roles have different names or shapes. The message contains the weight.
        """
        self.syncs = syncs
        self._models = models
        self._verified = dict.fromkeys(syncs, 0)
        for role, sync in syncs.items():
            own, given = (shapes_of(models[name].engine.weights()) for name in (role, sync.of))  # one after the other
            try:
                check_weights(role, own, given, sync.weight)
            except (ValueError, RealignError) as error:
                why = str(error).rstrip(".")
                raise ConfigError(f"sync.{role}.of={sync.of}: {why}. Choose two models of one architecture.") from error

    def after_step(self, step: int) -> dict[str, float]:
        """Run the syncs that are due after this step.

        Returns:
            For each role with new weights: `time/sync_<role>_s`, and the weight version `sync/<role>_version`.

        Raises:
            RuntimeError: a copy differs from its source; the message contains the role.
        """
        values = {}
        for role, sync in self.syncs.items():
            if step % sync.every_steps:
                continue
            started = time.perf_counter()
            source, target = self._models[sync.of], self._models[role]
            weights = source.engine.weights()
            target.engine.load_weights(weights, sync.weight)
            # tokens that the target samples then carry the version of the policy whose weights it has
            target.publish_weights(source.version)
            if sync.weight == 1 and self._verified[role] < VERIFIED:
                self._verified[role] += 1
                given = _digest(weights)
                del weights  # with sharded ranks, `weights` is a gathered full copy, and so is the target's
                taken = _digest(target.engine.weights())
                if given != taken:
                    raise RuntimeError(
                        f"sync.{role}: after the copy in step {step}, the weights of {role!r} (sha256 {taken[:12]}) "
                        f"differ from those of {sync.of!r} (sha256 {given[:12]})."
                    )
            values[f"time/sync_{role}_s"] = time.perf_counter() - started
            values[f"sync/{role}_version"] = float(target.version)
        return values


def _digest(weights: Mapping[str, Tensor]) -> str:
    return hash_of(dict(sorted(weights.items())))
