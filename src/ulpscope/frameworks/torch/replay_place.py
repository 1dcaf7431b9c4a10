"""Where a kernel belongs: the API call above it, the module, the phase, the parameter and the line of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope.frameworks.base import ThreadState
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.collective_tap import KIND as COLLECTIVE

_sequence = internals.sequence_now
_node = internals.current_node


class Places:
    """Remembers which forward call made which autograd node, and which tensors belong to which parameter."""

    def __init__(self, models: Sequence[Module], source: Callable[[int], tuple[str, int, str] | None]) -> None:
        self._models = list(models)
        self._source = source
        self._forwards: dict[int, dict[str, Any]] = {}
        self._names: dict[int, str] = {}
        self._optimizer: Any = None
        self._known_state = -1
        self._param: str | None = None
        self._handles: list[Any] = []

    def install(self) -> None:
        self._read_names()
        self._handles = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def add_model(self, model: Module) -> None:
        if not any(model is known for known in self._models):
            self._models.append(model)
            self._read_names()

    def begin_step(self) -> None:
        self._forwards.clear()

    def of(self, state: ThreadState, args: tuple[Any, ...]) -> dict[str, Any]:
        """phase, api, module, param and source of the kernel that is about to run."""
        if internals.backward_pass() != -1:
            found = self._backward(state)
            if found is not None:
                return found
        place = self._forward(state)
        if self._optimizer is not None:
            place["phase"] = "optimizer"
            place["param"] = self._optimized(args)
            return place
        if not state.modules:
            place["param"] = self._gradient(args)
            if place["param"] and any(call.kind == COLLECTIVE for call in state.calls):
                place["phase"] = "comm"
        if torch.is_grad_enabled():
            self._forwards.setdefault(_sequence() - 1, place)
        return place

    def name_of(self, tensors: list[Tensor], leaf: dict[str, Any]) -> str | None:
        """The name of a parameter among the arguments that has the shape of the leaf."""
        for tensor in tensors:
            base = tensor if id(tensor) in self._names else tensor._base
            if base is not None and id(base) in self._names and tuple(tensor.shape) == leaf["shape"]:
                return self._names[id(base)]
        return None

    def _forward(self, state: ThreadState) -> dict[str, Any]:
        call = state.calls[-1] if state.calls else None
        call = next((each for each in state.calls if each.kind == COLLECTIVE), call)
        return {
            "phase": "forward",
            "api": f"{call.kind}.{call.name}.{call.index}.forward" if call is not None else "",
            "module": state.modules[-1][0] if state.modules else "",
            "source": self._source(call.stack) if call is not None else None,
        }

    def _backward(self, state: ThreadState) -> dict[str, Any] | None:
        """A kernel inside a backward pass belongs to the call that made the running node; a forward that runs again
        (checkpointing) is a forward."""
        if state.modules and torch.is_grad_enabled():
            return None
        node: Any = _node()
        if node is None:
            return {"phase": "backward", "api": "", "module": "", "source": None}
        return self.of_node(node)

    def of_node(self, node: Any) -> dict[str, Any]:
        """The same of what a node of autograd runs."""
        made = self._forwards.get(node._sequence_nr())
        if made is not None:
            return {**made, "phase": "backward", "api": made["api"].removesuffix("forward") + "backward", "param": None}
        variable = getattr(node, "variable", None)
        name = self._names.get(id(variable)) if variable is not None else None
        return {
            "phase": "backward",
            "api": "",
            "module": name.rpartition(".")[0] if name else "",
            "source": None,
            "param": name,
        }

    # --- parameters ---------------------------------------------------------------------------------------------

    def _read_names(self) -> None:
        self._names = {}
        for number, model in enumerate(self._models):
            prefix = f"{number}." if len(self._models) > 1 else ""
            for name, value in model.named_parameters():
                self._names.setdefault(id(value), prefix + name)
            for name, buffer in model.named_buffers():
                self._names.setdefault(id(buffer), prefix + name)

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = optimizer
        self._known_state = -1
        self._param = None

    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = None

    def _optimized(self, args: tuple[Any, ...]) -> str | None:
        """The parameter whose value or state is the first argument; a temporary belongs to the parameter before it."""
        first = args[0] if args else None
        if isinstance(first, list | tuple) and first:
            return self._names.get(id(first[0]))
        if not isinstance(first, Tensor):
            return self._param
        name = self._names.get(id(first))
        if name is None and self._known_state != (size := _state_size(self._optimizer)):
            self._known_state = size
            for value, state in self._optimizer.state.items():
                owner = self._names.get(id(value))
                if owner is not None and isinstance(state, dict):
                    self._names.update({id(item): owner for item in state.values() if isinstance(item, Tensor)})
            name = self._names.get(id(first))
        if name is None:
            name = self._gradient(args)
        if name is not None:
            self._param = name
        return self._param

    def _gradient(self, args: tuple[Any, ...]) -> str | None:
        """The parameter whose gradient is among the arguments."""
        first = args[0] if args else None
        if isinstance(first, list | tuple) and first:
            first = first[0]
        if not isinstance(first, Tensor) or first.requires_grad:
            return None
        place = first.data_ptr()
        for model in self._models:
            for value in model.parameters():
                if value.grad is not None and (value.grad is first or value.grad.data_ptr() == place):
                    return self._names.get(id(value))
        return None


def _state_size(optimizer: Any) -> int:
    return sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))
