"""DeepSpeed's estimates of memory for a model's states, by its formulas (0.19.8: stage_1_and_2, stage3).

They hold for Adam in mixed precision, without activations. This runtime needs at most as much: it keeps no
second copy of the gradients.
"""

from __future__ import annotations

from torch import nn

from zlaunch.runtime.zero import placeholder

_GIB = 1 << 30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return bytes of host memory a node and of each GPU."""
    gpus = num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), 2 * total_params + int(18 * total_params / gpus)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return bytes of host memory a node, of each GPU, and of the largest layer's parameters."""
    gpus = num_gpus_per_node * num_nodes
    largest = 4 * largest_layer_params
    whole = total_params * 4 * num_gpus_per_node
    if not cpu_offload:
        device = largest + int(18 * total_params / gpus)
        host: float = largest_layer_params * 4 * num_gpus_per_node if zero_init else whole
    else:
        device = largest if cpu_offload_params else largest + int(2 * total_params / gpus)
        states = total_params * (18 if cpu_offload_params else 16) / num_nodes
        host = states if zero_init else max(whole, states)
    return int(host * additional_buffer_factor), device, largest


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Count the parameters of the model, and those of the module that itself holds the most."""
    total = sum(placeholder.shape_of(p).numel() for p in model.parameters())
    own = [sum(placeholder.shape_of(p).numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    return total, max(own)


def _head(stage: int, total: int, nodes: int, gpus: int, largest: int | None = None) -> None:
    layer = f", the largest layer {largest / 1e6:.0f}M" if largest is not None else ""
    print(
        f"Estimated memory needed for params, optim states and gradients (ZeRO stage {stage})\n"
        f"HW: {nodes} node{'s' * (nodes != 1)}, {gpus} GPU{'s' * (gpus != 1)} per node\n"
        f"SW: {total / 1e6:.0f}M total params{layer}\n"
        "  per CPU  |  per GPU |   Options"
    )


def _line(host: int, device: int, options: str) -> None:
    print(f"  {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}")


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the needs with and without offload."""
    _head(2, total_params, num_nodes, num_gpus_per_node)
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _line(host, device, f"offload_optimizer={'cpu' if offload else 'none'}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a model's needs with and without offload."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _sizes(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the needs with every kind of offload, with and without ``zero.Init``."""
    _head(3, total_params, num_nodes, num_gpus_per_node, largest_layer_params)
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                parameters,
                init,
                additional_buffer_factor,
            )
            places = {True: "cpu", False: "none"}
            options = f"offload_param={places[parameters]:4}, offload_optimizer={places[optimizer]:4}"
            _line(host, device, f"{options}, zero_init={int(init)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a model's needs with every kind of offload, with and without ``zero.Init``."""
    total, largest = _sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
