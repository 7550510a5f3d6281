"""Builds the compiled decoder while the package is installed, where there is a C compiler; goes on without one."""

from __future__ import annotations

import importlib.util
import platform
import re
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path(__file__).parent / "src" / "parlay" / "compiled" / "build.py"


class CompiledDecoder(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling finds this class by itself; see [tool.hatch.build.targets.wheel.hooks.custom]."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # The module is loaded by its path: the package itself needs torch, which is not here while it is built.
        spec = importlib.util.spec_from_file_location("compiled_build", BUILD)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            # Editable installations run this folder's library: one that fits stays. Wheels get one of their own.
            library = module.LIBRARY if version == "editable" and module.is_current() else module.build()
        except module.CannotBuild as reason:
            self.app.display_warning(f"Parlay will run on torch's operators alone: {reason}")
            return
        build_data["artifacts"].append(str(library.relative_to(Path(__file__).parent)))
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("universal2", platform.machine())  # the library is for one machine
        build_data["tag"] = f"py3-none-{re.sub(r'[-.]', '_', system)}"
