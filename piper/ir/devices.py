"""Sets of devices, as nodes carry them."""

from piper.devices import Devices, columns, groups_of, show

__all__ = ["Devices", "columns", "groups_of", "show"]
