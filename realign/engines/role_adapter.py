"""`RoleAdapter`: the adapter folder from which a role starts, and what happens to it."""

from __future__ import annotations

from dataclasses import dataclass

from realign.engines.files.adapters import AdapterFolder, AdapterStart, check_continues, find_adapter, is_adapter
from realign.engines.network.trains import Lora, Trained, require_peft_for
from realign.errors import ConfigError


@dataclass(frozen=True)
class RoleAdapter:
    """The settings of a role that decide about an adapter folder; see `TransformersModel`."""

    path: str
    start: AdapterStart
    trains: Trained

    @property
    def _saved_alone(self) -> bool:
        """Whether a saved folder contains only adapters."""
        return isinstance(self.trains, Lora) and not self.trains.merge_on_save

    @property
    def continues(self) -> bool:
        """Whether the adapter in `path` is trained further, so that the start of the run is not the base model."""
        if self.start is AdapterStart.auto:
            return self._saved_alone and is_adapter(self.path)
        return self.start is AdapterStart.continue_

    def find(self, name: str) -> AdapterFolder | None:
        """Return the adapter in `path`, if any, after a check of its files and of the settings that concern it.

        Args:
            name: the role, for messages.

        Raises:
            ConfigError: the settings do not fit the folder, or peft is missing.
            DataError: the folder is invalid.
        """
        what = f"models.{name}.path={self.path!r}"
        found = find_adapter(what, self.path)
        if found is None and self.start is not AdapterStart.auto:
            raise ConfigError(
                f"models.{name}.adapter={self.start.value}: models.{name}.path={self.path!r} is not an adapter "
                "folder (it has no adapter_config.json). Remove this key."
            )
        if found is None:
            return None
        require_peft_for(found.path)
        found.check(what)
        if self.continues:
            if not isinstance(self.trains, Lora):
                raise ConfigError(f"models.{name}.adapter=continue: requires models.{name}.trains=lora.")
            try:
                check_continues(found, rank=self.trains.rank, alpha=self.trains.alpha)
            except ConfigError as error:
                raise ConfigError(f"{what}: {error}") from error
        elif self._saved_alone:
            raise ConfigError(
                f"models.{name}.adapter=merge: with trains.merge_on_save=false, the saved adapter would need the "
                f"merged model, which is not saved. Set models.{name}.adapter=continue, or merge_on_save=true."
            )
        return found
