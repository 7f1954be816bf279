"""Visits of a shared block: low-rank adapters that each layer has of its own (Zamba2: https://arxiv.org/abs/2411.15242).

The projections are the shared block's, what is added to them (:class:`~hybridtf.nn.LowRank`) is the layer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hybridtf.core import AdaptersConfig, BlockOutput, BuildContext, ConfigError, Edges, known_names
from hybridtf.nn import Adapted, LowRank


class Visit(nn.Module):
    """What one layer adds to the shared block that it visits.

    It holds the layer's adapters alone and is handed the block at each call. It then calls a view of the block: module
    objects that hold the block's own parameters and parts, with adapted projections in place of the named ones. The block is
    not touched, so visits may run in any order, again (checkpointing) and in several threads, and whatever was done to
    the block since it was built (other devices, adapters of a library, replaced parts) is seen.

    Adapters are named after the path of their projection, with ``_`` for a dot: ``adapters.mixer_q_proj.down.weight``.
    """

    def __init__(self, config: AdaptersConfig, block: nn.Module, ctx: BuildContext) -> None:
        super().__init__()
        self.where = ctx.where
        self.paths: dict[str, str] = {}
        self.adapters = nn.ModuleDict()
        linears = {name: part for name, part in block.named_modules() if isinstance(part, nn.Linear)}
        for path in config.on:
            if path not in linears:
                raise ctx.error(f"no projection named {path!r} in the block. {known_names(path, linears)}")
            name = path.replace(".", "_")
            if name in self.paths:
                raise ctx.error(f"the names of {path!r} and {self.paths[name]!r} are the same with '_' for '.'")
            self.paths[name] = path
            self.adapters[name] = LowRank(linears[path].in_features, linears[path].out_features, config.rank, ctx)
        self._share(config, linears, ctx)

    def _share(self, config: AdaptersConfig, linears: Mapping[str, nn.Linear], ctx: BuildContext) -> None:
        """One ``down`` for those that the config says have one."""
        names = {path: name for name, path in self.paths.items()}
        for path in config.shared_down:
            if path not in names:
                raise ctx.error(f"shared_down: {path!r} has no adapter. {known_names(path, names)}")
            first = config.shared_down[0]
            if linears[path].in_features != linears[first].in_features:
                raise ctx.error(f"shared_down: {path!r} and {first!r} read inputs of different widths")
            self.adapters[names[path]].down = self.adapters[names[first]].down

    def forward(self, block: nn.Module, x: Tensor, edges: Edges, **options: Any) -> BlockOutput:
        """As ``block(x, edges, **options)``, with this layer's adapters in place."""
        out: BlockOutput = self.view(block)(x, edges, **options)
        return out

    def view(self, block: nn.Module) -> nn.Module:
        """The block as this layer sees it."""
        views = {"": _view(block, self.where)}
        for name, path in self.paths.items():
            at = ""
            *parents, leaf = path.split(".")
            for parent in parents:
                below = f"{at}.{parent}" if at else parent
                if below not in views:
                    views[below] = _view(_child(views[at], parent, path, self.where), self.where)
                    views[at]._modules[parent] = views[below]
                at = below
            base = _child(views[at], leaf, path, self.where)
            views[at]._modules[leaf] = Adapted(base, self.adapters[name])
        return views[""]


def _child(module: nn.Module, name: str, path: str, where: str) -> nn.Module:
    child = module._modules.get(name)
    if child is None:
        raise ConfigError(f"{where}: the shared block no longer has {path!r}: its parts were replaced or wrapped")
    return child


def _view(module: nn.Module, where: str) -> nn.Module:
    """A module with the same attributes, parameters, buffers and hooks, and a table of children of its own."""
    if "forward" in vars(module):
        name = type(module).__name__
        raise ConfigError(f"{where}: {name}.forward was replaced on the module itself: adapters cannot reach it")
    view: nn.Module = object.__new__(type(module))
    view.__dict__.update(vars(module))
    view.__dict__["_modules"] = dict(module._modules)
    view.__dict__["_compiled_call_impl"] = None  # it calls the module that was compiled, not the view
    return view
