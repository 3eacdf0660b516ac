"""List mutations of layers that are sharded by columns."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = ("tests/runtime/tensor_parallel/test_backward_order.py",)
MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/parallel/columns.py",
        "        elif torch._C._will_engine_execute_node(ctx.of_weight):",
        "        elif True:",
        "gradients of inputs alone leave activations in the graph",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/forwards.py",
        "or not self.module.weight.requires_grad:",
        "or False:",
        "a weight gets the gradient of a call for which it was frozen",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/columns.py",
        "self._left.setdefault((placeholder.backward_number(), layer), [])",
        "self._left.setdefault((0, layer), [])",
        "layers leave what they know where nobody looks",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/columns.py",
        "product if found is None else found.add_(product)",
        "product",
        "a layer that is called twice gets the gradient of one call",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/columns.py",
        "            of_weight = _rows(gradient).t() @ _rows(value)\n",
        "            pass\n",
        "second gradients of a weight are lost",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/columns.py",
        "        and not torch.is_autocast_enabled(value.device.type)\n",
        "",
        "gradients under autocast have another dtype than weights",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/columns.py",
        "            return reduce_from(gradient, ctx.axis, ctx.channel), None, None, None\n",
        "            pass\n",
        "second gradients do not see the sum over the ranks",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/tensor.py",
        "                layers.append(forward.module)\n",
        "                pass\n",
        "sums wait for the gradients of weights",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/forwards.py",
        "return compute(module, shard, None, shared)",
        "return compute(module, shard, None, None)",
        "sums wait for the gradients of row layers' weights",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/forwards.py",
        "self._copy if sums_early(input) else None",
        "None",
        "sums of replicated inputs wait for the gradients of weights",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/token_shards.py",
        "        if sums_early(hidden):\n",
        "        if False:\n",
        "sums of divided tokens wait for the gradients of weights",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/forwards.py",
        "        if not module.weight.requires_grad or not sums_early(shard):\n",
        "        if self.axis.column_input is None or not sums_early(shard):\n",
        "a row layer that is recomputed alone saves other tensors than before",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/forwards.py",
        "        if not self.module.training:\n",
        "        if False:\n",
        "generate chooses among a rank's own words",
        ("tests/runtime/tensor_parallel/test_vocabulary_loss.py",),
    ),
)
