"""Faults for `make mutants`, each a single edit of the package, with the tests that have to find it."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "keras_paragrad"


class Fault(NamedTuple):
    """A fault.

    Attributes:
        name: What goes wrong.
        file: Where, below `keras_paragrad`.
        old: The text that is replaced, which is in the file once.
        new: What it is replaced with.
        tests: The tests to run, below `tests`: files, or `file::test`.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: The text to replace is not in it, or more than once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name!r} replaces {self.old!r}, which is in {self.file} {count} times instead of once. Plant it "
                "in what the code is now, in tests/mutants/faults.py."
            )
        return source.replace(self.old, self.new)


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, old, new, tests)


_ACCUMULATION = [
    _fault(
        "a micro-batch counts for one row more than it has",
        "engine/step/apply.py",
        'value = tf.cast(normalizer.value, "float32")',
        'value = tf.cast(normalizer.value, "float32") + 1.0',
        "accumulation/test_weights.py::test_masks",
    ),
    _fault(
        "the divisor of a window is not reset by an update",
        "accumulation/window.py",
        "self.weight.value.assign(0.0)",
        "pass",
        "accumulation/test_tail.py::test_tail",
    ),
    _fault(
        "a window's gradients are added to the sums of the one before",
        "accumulation/window.py",
        'first = tf.equal(tf.math.reciprocal(before), float("inf"))',
        "first = tf.constant(False)",
        "accumulation/test_tail.py::test_tail",
    ),
    _fault(
        "a micro-batch that is dropped for a NaN still counts in the divisor",
        "accumulation/window.py",
        "weight = tf.where(finite, weight, before)",
        "weight = tf.where(finite, weight, weight)",
        "accumulation/test_mixed_precision.py::test_skip_nonfinite",
    ),
    _fault(
        "a last window of one micro-batch is not flushed",
        "accumulation/optimizer.py",
        "int(self.window.position.numpy()) == 0:",
        "int(self.window.position.numpy()) <= 1:",
        "accumulation/test_tail.py::test_tail",
    ),
    _fault(
        "schedules and iterations see micro-batches",
        "accumulation/optimizer.py",
        "position.assign_add(1)\n",
        "position.assign_add(1), self.iterations.assign_add(1)\n",
        "accumulation/test_delegation.py",
    ),
    _fault(
        "a schedule of steps changes one update late in the graph",
        "accumulation/window.py",
        "tf.where(update >= first,",
        "tf.where(update > first,",
        "accumulation/test_arguments.py",
    ),
    _fault(
        "passes are a part of the loop that runs them",
        "accumulation/slices.py",
        "rows, in_loop=True, **fields)",
        "rows, **fields)",
        "accumulation/test_microbatch.py::test_passes_in_a_loop_are_functions_of_their_own",
    ),
    _fault(
        "the rest of a batch that is cut into slices loses its first row",
        "accumulation/slices.py",
        "first = rows // self.size * self.size",
        "first = rows // self.size * self.size + 1",
        "accumulation/test_microbatch.py::test_equals_the_whole_batch",
    ),
    _fault(
        "the first runs of all slices draw the same random numbers",
        "accumulation/gradient_cache.py",
        "with ReadScope(self.model.name, state, reason) as scope:",
        "with ReadScope(self.model.name, [], reason) as scope:",
        "accumulation/test_comparing.py::test_both_runs_of_a_slice_draw_the_same_numbers",
    ),
    _fault(
        "each slice's backward pass begins with the first rows of the outputs' gradient",
        "accumulation/gradient_cache.py",
        "cotangents = rows_at(whole.cotangents, first, self.size)",
        "cotangents = rows_at(whole.cotangents, 0, self.size)",
        "accumulation/test_comparing.py::test_every_loss_in_uneven_slices",
    ),
]

_STEP = [
    _fault(
        "the norm of a gradient in shards is that of one shard",
        "storage/updating.py",
        "    for index, total in zip(divided, sum_over_replicas([squares[index] for index in divided]), strict=True):",
        "    for index, total in zip(divided, [squares[index] for index in divided], strict=True):",
        "sharding/test_shards.py::test_every_kind_of_optimizer",
    ),
    _fault(
        "copies of weights in shards are not refreshed",
        "engine/step/apply.py",
        "per_replica(functools.partial(refresh, variables))",
        "pass",
        "sharding/test_shards.py::test_two_replicas",
    ),
    _fault(
        "an optimizer that needs whole variables is given shards",
        "storage/updating.py",
        'return type(optimizer).update_step in _ELEMENTWISE and "update_step" not in vars(optimizer)',
        "return True",
        "sharding/test_shards.py::test_every_kind_of_optimizer",
    ),
    _fault(
        "gathered weights are kept for the backward pass",
        "storage/regathering.py",
        "    if not gathered:\n",
        "    if gathered:\n",
        "sharding/test_storage.py::test_the_backward_pass_gathers_weights_again",
    ),
    _fault(
        "weights that a compiled layer returns are kept for the backward pass",
        "storage/regathering.py",
        "            if use.type in _CALLS:\n",
        "            if False:\n",
        "sharding/test_compiled_by_layer.py::test_gathered_weights_are_not_kept",
    ),
    _fault(
        "masks and losses of layers that are compiled by themselves stay inside",
        "compat/compiled_call.py",
        "    losses.replace(added)\n",
        "    losses.replace([])\n",
        "sharding/test_compiled_by_layer.py::test_losses_leave_what_is_compiled",
    ),
    _fault(
        "a shard is a slice, which keeps the whole variable in memory",
        "storage/sharding.py",
        "return tf.raw_ops.DeepCopy(x=self.shard(whole, index))",
        "return self.shard(whole, index)",
        "sharding/test_shards.py::test_shards_are_in_memory_of_their_own",
    ),
    _fault(
        "a worker does not wait for those that still read from it",
        "distribution/workers.py",
        "    barrier()\n    return gathered",
        "    return gathered",
        "distribution/test_consistency.py::test_no_worker_ends_before_others_have_read",
    ),
    _fault(
        "two attempts at a backup give their shards the same names",
        "distribution/checkpoint/shards.py",
        'key = f"{int(gather(strategy, np.array([secrets.randbits(62)]))[0, 0]):016x}"',
        'key = "0" * 16',
        "distribution/checkpoint/test_shards.py::test_killed_while_writing",
    ),
    _fault(
        "a worker that can't write its part of a backup leaves the others waiting",
        "distribution/checkpoint/shards.py",
        "        collections.deque(shards, maxlen=0)\n",
        "",
        "distribution/checkpoint/test_shards.py::test_a_worker_that_can_not_write_still_reads",
    ),
    _fault(
        "workers of a mesh all write the same part of a backup",
        "storage/mesh_variable.py",
        "[placement.worker * size : (placement.worker + 1) * size]",
        "[:size]",
        "sharding/test_mesh.py::test_two_workers_end_where_one_device_ends",
    ),
    _fault(
        "gradients are clipped before they are all-reduced, too",
        "engine/step/apply.py",
        "[gradients[index] for index in present], [variables[index] for index in present], also_reduce\n",
        "optimizer._clip_gradients([gradients[index] for index in present]),\n        "
        "[variables[index] for index in present],\n        also_reduce,\n",
        "accumulation/test_microbatch.py::test_on_two_replicas",
    ),
    _fault(
        "an overflow on another replica than the first spoils the update there alone",
        "engine/step/apply.py",
        'tf.where(elsewhere > 0, float("nan"), 1.0)',
        'tf.where(elsewhere > 1, float("nan"), 1.0)',
        "distribution/test_fit.py::test_the_loss_scale_falls_for_what_only_the_last_replica_sees",
    ),
    _fault(
        "workers that hold different shards know of an overflow in their own alone",
        "engine/step/apply.py",
        "    if any_divided(variables) and unwrap_loss_scale(optimizer) is not optimizer:\n",
        "    if False:\n",
        "sharding/test_shards.py::test_an_overflow_on_one_worker_is_an_update_on_none",
    ),
    _fault(
        "a skipped update overwrites weights with their averages",
        "engine/step/apply.py",
        "tf.logical_and(tf.not_equal(now, earlier), tf.equal(now % frequency, 0))",
        "tf.equal(now % frequency, 0)",
        "distribution/test_fit.py::test_a_skipped_update_overwrites_nothing",
        "sharding/test_shards.py::test_an_overflow_on_one_worker_is_an_update_on_none",
    ),
    _fault(
        "a replica clears the losses that another's layers have added",
        "engine/replicas/prepared.py",
        "    separate_added_losses(model)\n",
        "",
        "distribution/test_added_losses.py",
    ),
    _fault(
        "replicas count the same, whatever their shards hold",
        "engine/step/gradient.py",
        "return tf.where(total > 0, value * replica_count() / total, one)",
        "return one",
        "distribution/test_fit.py::test_a_replica_without_rows_adds_nothing",
    ),
    _fault(
        "the gradient of a shard without rows is not zeroed",
        "engine/replicas/replica_batch.py",
        "return tf.cond(self.nonempty, lambda: gradient, lambda: tf.zeros_like(gradient))",
        "return gradient",
        "distribution/test_fit.py::test_a_replica_without_rows_adds_nothing",
    ),
    _fault(
        "a call of several batches leaves the last of them out",
        "engine/step/execution.py",
        "return tf.logical_and(index < per_call, has_batch)",
        "return tf.logical_and(index < per_call - 1, has_batch)",
        "accumulation/test_tail.py::test_tail",
    ),
    _fault(
        "a step is traced for one batch after another",
        "engine/step/execution.py",
        "self._function.get_concrete_function(spec)",
        "pass",
        "distribution/data/test_replicas.py::test_the_graph_of_a_step_is_there_once",
    ),
    _fault(
        "weights are gathered again after the statistics whose gradients need them",
        "storage/regathering.py",
        "with _separate_collective_order():",
        "with contextlib.nullcontext():",
        "sharding/test_shards.py::test_two_workers_with_synchronized_statistics",
    ),
    _fault(
        "a transform is applied twice",
        "engine/step/interception.py",
        "whole = transform(unscaled, changed)",
        "whole = transform(transform(unscaled, changed), changed)",
        "test_transform.py::test_on_one_device",
    ),
    _fault(
        "a transform sees gradients with the loss scale in them",
        "engine/step/interception.py",
        "unscaled = [gradient / scale for gradient in dense] if scale else dense",
        "unscaled = dense",
        "test_transform.py::test_without_loss_scale",
    ),
    _fault(
        "a transform sees each replica's gradient before the all-reduce",
        "engine/step/train_step.py",
        "whole = gradient.weight is not None or self.stages.chain is not None",
        "whole = gradient.weight is not None",
        "test_transform.py::test_on_replicas_that_are_not_weighed",
    ),
    _fault(
        "shards are clipped by the norm of the gradient before its transform",
        "engine/step/interception.py",
        "replace_norms(optimizer, whole, changed)",
        "replace_norms(optimizer, unscaled, changed)",
        "sharding/test_storage.py::test_telemetry_and_transforms_see_whole_gradients",
    ),
]

_LOSSES = [
    _fault(
        "the divisor of a loss ignores the mask",
        "engine/losses/divisors.py",
        'size * tf.reduce_mean(tf.cast(term.mask, "float32"))',
        "size",
        "accumulation/test_weights.py::test_masks",
    ),
    _fault(
        "the divisor of a loss ignores the sample weights",
        "engine/losses/divisors.py",
        'weights = tf.reduce_sum(tf.cast(term.weights, "float32"))',
        'weights = tf.cast(tf.size(term.weights), "float32")',
        "accumulation/test_weights.py::test_class_weights",
    ),
    _fault(
        "the losses of a window are not reset by its update",
        "engine/losses/sums.py",
        "self.window.state.assign(tf.zeros_like(state) if self.ends else state)",
        "self.window.state.assign(state)",
        "accumulation/test_callback.py::test_the_logs_are_keras_own",
        "distribution/test_history.py::test_in_slices_and_in_windows",
    ),
    _fault(
        "each example's own masked mean ignores the sample weights",
        "engine/losses/terms.py",
        "weight *= stated",
        "weight *= 1.0",
        "per_example/test_masked_mean.py::test_each_example_is_as_alone",
    ),
]

_PER_EXAMPLE = [
    _fault(
        "the norms of dense layers leave the bias out",
        "per_example/rules/linear.py",
        "return [(left + 1.0) * right]",
        "return [left * right]",
        "per_example/test_rules.py::test_a_rule_is_the_loop[Dense]",
    ),
    _fault(
        "the bias of a convolution has its gradient along the last axis, wherever the channels are",
        "per_example/rules/linear.py",
        "return [rank - 1 if size == cotangent.shape[-1] else 1]",
        "return [rank - 1]",
        "per_example/test_rules.py::test_a_rule_is_the_loop[Conv2D]",
    ),
    _fault(
        "an example that is not finite stays in sums of biases",
        "per_example/rule.py",
        "weighted_sum(weights, zeroed(bias, weights), by_xla)",
        "weighted_sum(weights, bias, by_xla)",
        "per_example/test_nonfinite.py::test_inputs_that_are_not_finite",
    ),
    _fault(
        "sums of biases are of cotangents that are not zeroed",
        "per_example/rule.py",
        "for bias in biases(calls)]",
        "for bias in biases([call.original or call for call in calls])]",
        "privacy/test_sensitivity.py",
    ),
    _fault(
        "a gradient of weight 0 that is not finite stays in the sum of gradients",
        "per_example/rules/linear.py",
        "lambda: total, sum_zeroed)",
        "lambda: total, lambda: total)",
        "per_example/test_nonfinite.py::test_inputs_that_are_not_finite",
    ),
    _fault(
        "an example whose norm is not finite is not zeroed",
        "per_example/quantities.py",
        "tf.logical_not(tf.math.is_finite(norms))",
        "tf.math.is_finite(norms)",
        "per_example/test_nonfinite.py::test_inputs_that_are_not_finite",
    ),
    _fault(
        "weighted sums of separable convolutions have unweighted biases",
        "per_example/rules/separable.py",
        "biases = sums_of_biases(lambda calls: self._bias(calls[0]), [call], weights)",
        "biases = [tf.reduce_sum(bias, 0) for bias in self._bias(call)]",
        "per_example/test_rules.py::test_a_rule_is_the_loop[SeparableConv2D]",
    ),
    _fault(
        "windows of padded convolutions lie one pixel off",
        "per_example/rules/windows.py",
        "else missing // 2",
        "else -(-missing // 2)",
        "per_example/test_windows.py",
    ),
    _fault(
        "the windows of a depthwise convolution have a stride of one",
        "per_example/rules/folded.py",
        '"VALID", dilations=[stride, stride])',
        '"VALID", dilations=[1, 1])',
        "per_example/test_rules.py::test_a_convolution_folded_into_channels[DepthwiseConv2D]",
    ),
    _fault(
        "a word that an example looks up twice counts as two rows",
        "per_example/rules/embedding.py",
        "same = tf.cast(indices[:, :, tf.newaxis] == indices[:, tf.newaxis], cotangents.dtype)",
        "same = tf.eye(tf.shape(indices)[1], dtype=cotangents.dtype)",
        "per_example/test_rules.py::test_a_rule_is_the_loop[Embedding]",
    ),
    _fault(
        "the offset of a normalization has the mean over positions for its gradient",
        "per_example/rules/normalization.py",
        "gradients.append(tf.reduce_sum(cotangent, summed))",
        "gradients.append(tf.reduce_mean(cotangent, summed))",
        "per_example/test_rules.py::test_a_rule_is_the_loop[LayerNormalization]",
    ),
    _fault(
        "adapters count without their scale",
        "per_example/rules/low_rank.py",
        "layer.lora_alpha / layer.lora_rank",
        "1.0",
        "per_example/test_low_rank.py::test_only_what_is_trained_counts",
    ),
    _fault(
        "an adapted kernel's last axis keeps its place where it is summed over",
        "per_example/rules/einsum.py",
        "sides if last in axes.inputs else sides[::-1]",
        "sides[::-1]",
        "per_example/test_low_rank.py::test_kernels_with_any_last_axis",
    ),
    _fault(
        "quantized layers are not recorded, and fall back to a loop",
        "per_example/capture.py",
        'return "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"',
        'return "call"',
        "per_example/test_low_rank.py::test_the_frozen_weight_is_quantized",
    ),
    _fault(
        "the norms of examples have the loss scale in them",
        "per_example/step.py",
        "weight * self._loss_scale())",
        "weight)",
        "per_example/test_training.py::test_half_precision",
    ),
    _fault(
        "the noise scale takes the sum of micro-batches' squared norms for their mean",
        "per_example/noise_scale.py",
        "small, inverse_small, inverse_large = squares / count, inverses / count, 1 / rows",
        "small, inverse_small, inverse_large = squares, inverses / count, 1 / rows",
        "per_example/test_callbacks.py::test_from_accumulation",
    ),
]

_INPUTS = [
    _fault(
        "every row is differentiated with respect to the first row's label",
        "inputs/function.py",
        "return tf.gather(value, labels, axis=-1, batch_dims=1)",
        "return tf.gather(value, labels[0], axis=-1)",
        "inputs/test_labels.py::test_gradients_of_each_rows_own_class",
    ),
    _fault(
        "integrated gradients are taken half a step off",
        "inputs/attribution.py",
        "tf.constant((points + 1) / 2)",
        "tf.constant((points + 1 + 1 / self.steps) / 2)",
        "inputs/test_second_order.py::test_attributions_add_up_to_the_difference",
    ),
    _fault(
        "the rows that fill up the last chunk are in the result",
        "inputs/run.py",
        "yield [result[: chunk.rows] for result in results]",
        "yield list(results)",
        "inputs/test_data.py::test_batches_of_any_size",
    ),
    _fault(
        "rows of a Jacobian are taken from overlapping rounds",
        "inputs/jacobian.py",
        "results = run_round(index * per_round)",
        "results = run_round(index * (per_round - 1))",
        "inputs/test_jacobian.py::test_any_sizes",
    ),
]

_DISTRIBUTION = [
    _fault(
        "a batch loses the rows that don't divide evenly among replicas",
        "distribution/data/batch_sharding.py",
        "return index * (rows // shards) + min(index, rows % shards)",
        "return index * (rows // shards)",
        "distribution/data/test_batch_sharding.py::test_sizes",
    ),
    _fault(
        "a shuffled epoch is in another order on each worker",
        "distribution/data/sources.py",
        "return int(gather(strategy, np.array([seed], np.int64))[0, 0])",
        "return seed",
        "distribution/data/test_workers.py::test_all_workers_draw_the_same_order",
    ),
    _fault(
        "every epoch is shuffled alike",
        "distribution/data/sources.py",
        "np.random.default_rng((seed, epoch))",
        "np.random.default_rng((seed, 0))",
        "distribution/data/test_order.py",
    ),
    _fault(
        "an epoch that is begun in its middle leaves out batches as if there were one replica",
        "distribution/data/distributed.py",
        ".skip(skip * self._local)",
        ".skip(skip)",
        "distribution/data/test_replicas.py::test_sizes_places_and_refusals",
    ),
    _fault(
        "the variance of a normalization leaves out the distance between parts",
        "distribution/data/adapting.py",
        "self.deviations + other.deviations + between",
        "self.deviations + other.deviations",
        "distribution/data/test_normalization.py",
    ),
    _fault(
        "the description of a model ignores activations",
        "distribution/consistency/describe.py",
        '"registered_name", "module", "build_config"',
        '"registered_name", "module", "activation", "build_config"',
        "distribution/test_consistency.py::test_what_shapes_the_computation_is_named",
    ),
    _fault(
        "weights of equal norm count as the same",
        "distribution/consistency/compare.py",
        "close &= (np.abs",
        "close |= (np.abs",
        "distribution/test_consistency.py::test_weights_are_compared_within_rounding",
    ),
    _fault(
        "a learning rate that is scaled linearly grows by the square root",
        "distribution/decisions/batch.py",
        'return float(replicas) if rule == "linear" else math.sqrt(replicas)',
        "return math.sqrt(replicas)",
        "distribution/test_plan.py",
    ),
    _fault(
        "Slurm's node lists lose zeros in front",
        "distribution/clusters/slurm.py",
        "str(number).zfill(len(first))",
        "str(number)",
        "distribution/test_cluster.py",
    ),
    _fault(
        "Slurm's ranks are counted as if every node had as many tasks",
        "distribution/clusters/slurm.py",
        "return sum(tasks[:node]) + task",
        "return node * tasks[node] + task",
        "distribution/test_cluster.py",
    ),
    _fault(
        "launched workers share a GPU",
        "distribution/launch/tasks.py",
        "names[index * self.devices : (index + 1) * self.devices]",
        "names[index : index + self.devices]",
        "distribution/test_launch_places.py::test_each_worker_sees_its_share_of_the_devices",
    ),
    _fault(
        "parameter servers count what each step adds to the metrics twice",
        "engine/servers/metric_states.py",
        "self._total += added",
        "self._total += 2 * added",
        "distribution/servers/test_training.py::test_counts_are_exact_in_every_run_and_the_loss_falls",
    ),
]

_CHECKPOINTS = [
    _fault(
        "the checksum of a backup is not compared",
        "distribution/checkpoint/file_format.py",
        'return _line({**described, "position": list(manifest["position"])}, content) == line + b"\\n"',
        'return described["bytes"] == len(content)',
        "distribution/checkpoint/test_files.py",
    ),
    _fault(
        "the oldest backup to keep is removed",
        "distribution/checkpoint/files.py",
        "[self.keep :]",
        "[self.keep - 1 :]",
        "distribution/checkpoint/test_files.py",
    ),
    _fault(
        "a fit that goes on skips one batch too many",
        "distribution/checkpoint/resuming.py",
        "StepBuilder.of(self.model).skip_batches(self.position.batch, on_resumed)",
        "StepBuilder.of(self.model).skip_batches(self.position.batch + 1, on_resumed)",
        "distribution/checkpoint/test_backup.py::test_resumed_equals_undisturbed",
    ),
]

_PROFILING = [
    _fault(
        "batches are numbered from the one after",
        "profiling/analysis/steps.py",
        "yield first + index, ",
        "yield first + index + 1, ",
        "profiling/test_analysis.py",
    ),
    _fault(
        "time that spans share counts for each of them",
        "profiling/analysis/events.py",
        "np.maximum.accumulate(ordered[:, 1]) if",
        "ordered[:, 1] if",
        "profiling/test_analysis.py::test_coverage_is_that_of_counted_ticks",
    ),
    _fault(
        "windows follow each other without the wait between them",
        "profiling/schedule.py",
        "index * (self.wait + self.warmup + self.active)",
        "index * (self.warmup + self.active)",
        "profiling/test_schedule.py",
    ),
    _fault(
        "telemetry shows norms before clipping as those after it",
        "engine/telemetry/watch.py",
        "both[index], both[index + len(positions)]",
        "both[index], both[index]",
        "profiling/telemetry/test_values.py::test_clipping",
    ),
    _fault(
        "throughput counts steps that compiled",
        "profiling/pace.py",
        "counted = steps - self._excluded_steps",
        "counted = steps",
        "profiling/throughput/test_throughput.py",
    ),
    _fault(
        "the operations of a product whose left side is transposed are counted along the wrong axis",
        "flops.py",
        'operation.get_attr("transpose_a")',
        'operation.get_attr("transpose_b")',
        "test_flops.py",
    ),
    _fault(
        "charts of long series lose their peaks",
        "profiling/report/formatting.py",
        "finite[np.argmax(values[finite])]",
        "finite[-1]",
        "profiling/report/test_drawing.py::test_thinning_keeps_the_extremes",
    ),
    _fault(
        "a chart shows values at the pointer beside those of other steps",
        "profiling/report/lines.py",
        "np.diff(steps, prepend=0)",
        "np.diff(steps, prepend=steps[0])",
        "profiling/report/test_drawing.py::test_the_script_is_given_the_values_drawn",
    ),
]

_SHARDING = [
    _fault(
        "a layer that runs again draws other random numbers",
        "engine/step/recompute.py",
        "weights, later(self.captured.before), list(cotangents)",
        "weights, later([each + 1 for each in self.captured.before]), list(cotangents)",
        "sharding/test_recompute.py::test_with_slices_and_accumulation",
    ),
    _fault(
        "a layer that runs again doesn't know that it is trained",
        "compat/layers.py",
        'set_global_attribute("current_call_ctx", copy.copy(self.context))',
        'set_global_attribute("current_call_ctx", None)',
        "sharding/test_recompute.py::test_trains_as_without",
    ),
    _fault(
        "a recomputed layer's statistics are not updated",
        "engine/step/recompute.py",
        "for variable, value in run.updates:",
        "for variable, value in ():",
        "sharding/test_recompute.py::test_trains_as_without",
    ),
    _fault(
        "losses that recomputed layers add are lost",
        "engine/step/recompute.py",
        "for loss in run.losses:",
        "for loss in ():",
        "sharding/test_recompute.py::test_trains_as_without",
    ),
    _fault(
        "weights without a gradient get one of zeros from a recomputed layer",
        "engine/step/recompute.py",
        "tape.gradient(targets, sources, cotangents)",
        'tape.gradient(targets, sources, cotangents, unconnected_gradients="zero")',
        "sharding/test_recompute.py::test_trains_as_without",
    ),
    _fault(
        "segments are run once",
        "engine/step/segments.py",
        "return Recomputed(run, part.name, part.layers, owner) if again else run",
        "return run",
        "sharding/test_segments.py::test_keeps_what_is_expected",
    ),
    _fault(
        "a micro-batch without a row of its own counts",
        "distribution/pipeline/preparation.py",
        "_PossiblyEmpty(last - first, last > first)",
        "_PossiblyEmpty(last - first)",
        "sharding/test_pipeline.py::test_ends_where_one_device_ends",
    ),
    _fault(
        "a pipeline's weights get no gradient from other devices than their own",
        "engine/pipeline/on_device.py",
        "lambda gradient: [gradient]",
        "lambda gradient: [0 * gradient]",
        "sharding/test_pipeline.py::test_columns_of_devices_end_where_one_device_ends",
    ),
    _fault(
        "all gradients of a pipeline pass its first device",
        "engine/pipeline/placement.py",
        "updating_optimizers(model.optimizer) if _REDUCE not in inner.__dict__]",
        "parts(model.optimizer) if False]",
        "sharding/test_pipeline.py::test_stages_run_on_their_devices_and_wait_for_nothing_else",
    ),
    _fault(
        "copies of a pipeline's weights outlive an update",
        "engine/pipeline/on_device.py",
        "        self._copies = {}\n        try:",
        "        self._copies = getattr(self, '_before', {})\n        self._before = self._copies\n        try:",
        "sharding/test_pipeline.py::test_columns_of_devices_end_where_one_device_ends",
    ),
    _fault(
        "only the first devices of a pipeline's stages count",
        "distribution/pipeline/preparation.py",
        "functools.reduce(sums.merge, totals)",
        "totals[0]",
        "sharding/test_pipeline.py::test_columns_of_devices_end_where_one_device_ends",
    ),
    _fault(
        "state is lost on other devices of a pipeline's stage than the first",
        "engine/pipeline/on_device.py",
        "            variable.assign(value)",
        "            variable.assign(variable)",
        "sharding/test_pipeline.py::test_micro_batches_of_all_columns_find_the_state_that_those_before_left",
    ),
    _fault(
        "segments in a pipeline's stages are not recomputed",
        "engine/step/segments.py",
        "        if self.segments is None:\n            return functools.partial(_run_part, stage)",
        "        if True:\n            return functools.partial(_run_part, stage)",
        "sharding/test_pipeline.py::test_segments_run_again_on_the_device_of_their_stage",
    ),
    _fault(
        "slices of float16 overflow where the batch does not",
        "accumulation/slice_sums.py",
        'share = tf.cast(rows_of(data), "float32") / tf.cast(rows, "float32")',
        'share = tf.cast(rows, "float32") / tf.cast(rows, "float32")',
        "sharding/test_pipeline.py::test_small_slices_overflow_no_earlier_than_the_batch",
    ),
    _fault(
        "masks that attention takes off its inputs are missing when it runs again",
        "engine/step/recompute.py",
        "pack_dense_parts(self.leaves, parts, self.masks)",
        "pack_dense_parts(self.leaves, parts)",
        "sharding/test_recompute.py::test_trains_as_without",
    ),
    _fault(
        "a model that is compiled again stays prepared for what it was",
        "distribution/parallelism.py",
        "            before.renew()",
        "            pass",
        "distribution/test_parallelism.py::test_undo_leaves_what_was_compiled_since",
    ),
    _fault(
        "a gradient that differs on a mesh is trained with",
        "distribution/mesh/parallelism.py",
        "if error > tolerance(self.model):",
        "if error > 1e9:",
        "sharding/test_mesh.py::test_what_is_refused_before_training",
    ),
    _fault(
        "accumulators on a mesh are whole on each device",
        "engine/mesh/running.py",
        'owner = variable if section == "model" else accumulators.get(id(variable))',
        'owner = variable if section == "model" else None',
        "sharding/test_mesh.py::test_ends_where_one_device_ends",
    ),
    _fault(
        "an average pool's gradient on a mesh counts places outside of the image",
        "engine/mesh/equivalents.py",
        "inside / inside.sum(1, keepdims=True)",
        "inside / window",
        "sharding/test_mesh_operations.py::test_gradients_of_average_pools",
    ),
    _fault(
        "a depthwise convolution's gradient on a mesh is that of the kernel as it is",
        "engine/mesh/equivalents.py",
        "np.arange(width)[::-1]",
        "np.arange(width)",
        "sharding/test_mesh_operations.py::test_gradients_of_depthwise_convolutions",
    ),
    _fault(
        "a dilated convolution on a mesh puts the places of its blocks beside each other",
        "engine/mesh/equivalents.py",
        "for position in (count + axis, axis)]",
        "for position in (axis, count + axis)]",
        "sharding/test_mesh_operations.py::test_dilated_convolutions",
    ),
    _fault(
        "a place of an axis is taken on a mesh as DTensor takes it",
        "engine/mesh/equivalents.py",
        '    (gen_array_ops, "strided_slice", strided_slice),\n',
        "",
        "sharding/test_mesh.py::test_ends_where_one_device_ends",
    ),
    _fault(
        "workers take their parts of a mesh's tensor for the whole",
        "storage/dtensor.py",
        "if not _is_whole_on_each_worker(layout):",
        "if False:",
        "sharding/test_mesh.py::test_two_workers_end_where_one_device_ends",
    ),
    _fault(
        "what is frozen when it is placed is never trained",
        "storage/model_variables.py",
        "variable.trainable = variable._value.trainable",
        "pass",
        "sharding/test_placed.py::test_acts_as_on_one_device",
    ),
    _fault(
        "what a probe changes in Python attributes stays",
        "engine/probes/untouched.py",
        "        for restore in restorers:\n            restore()\n",
        "",
        "test_untouched.py::test_leaves_no_trace",
    ),
    _fault(
        "the check of a mesh's first batch counts",
        "storage/dtensor.py",
        "    CONTEXT.assigned = {}\n",
        "    CONTEXT.assigned = None\n",
        "sharding/test_placed.py::test_acts_as_on_one_device",
    ),
    _fault(
        "callbacks that update variables in shards are given shards",
        "storage/creation.py",
        "    if not sharded or any(",
        "    if sharded or any(",
        "sharding/test_placed.py::test_acts_as_on_one_device",
    ),
    _fault(
        "gradients of lookups are summed by row in a pipeline",
        "storage/row_gradients.py",
        "if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):",
        "if False:",
        "sharding/test_pipeline.py::test_ends_where_one_device_ends",
    ),
    _fault(
        "DTensor combines all-reduces",
        "storage/dtensor.py",
        'os.environ.setdefault(COMBINE_PASS, "0") != "0"',
        'os.environ.get(COMBINE_PASS) == "2"',
        "sharding/test_mesh.py::test_the_combine_pass_stays_off",
    ),
]

_PRIVACY = [
    _fault(
        "all updates have the noise of the first",
        "privacy/update.py",
        "tf.identity(self.position)",
        "tf.constant(0, tf.int64)",
        "privacy/test_noise.py::test_noise_is_normal_and_independent",
    ),
    _fault(
        "all variables have the noise of one key",
        "privacy/update.py",
        "tf.random.fold_in(seed, index, alg=_ALGORITHM)",
        "tf.random.fold_in(seed, 0, alg=_ALGORITHM)",
        "privacy/test_noise.py::test_noise_is_normal_and_independent",
    ),
    _fault(
        "half of the noise is the other half again",
        "privacy/update.py",
        "length * tf.sin(angle)",
        "length * tf.cos(angle)",
        "privacy/test_update.py::test_equals_updates_by_hand",
    ),
    _fault(
        "noise is a tenth too small",
        "privacy/private_model.py",
        "self.privacy.gradient_noise_multiplier /",
        "0.9 * self.privacy.gradient_noise_multiplier /",
        "privacy/test_noise.py::test_noise_is_normal_and_independent",
    ),
    _fault(
        "noise goes by the optimizer's count, which a new one begins at 0",
        "privacy/private_model.py",
        "                self._releases.position,\n",
        "                self.optimizer.iterations.value,\n",
        "privacy/test_noise.py::test_a_new_optimizer_does_not_repeat_noise",
    ),
    _fault(
        "each replica takes noise of its own from the system",
        "privacy/update.py",
        "    if replica_count() == 1:\n        return draws",
        "    if replica_count() >= 1:\n        return draws",
        "privacy/test_replicas.py::test_the_systems_noise_is_one_draw",
    ),
    _fault(
        "batches have the same size, as shuffled ones have",
        "privacy/sampling.py",
        "min(random.binomial(self.examples, self.rate), self.rows)",
        "min(round(self.examples * self.rate), self.rows)",
        "privacy/test_sampling.py::test_examples_are_drawn_independently",
    ),
    _fault(
        "an update is drawn again if it is empty",
        "privacy/sampling.py",
        "min(random.binomial(self.examples, self.rate), self.rows)",
        "min(max(1, random.binomial(self.examples, self.rate)), self.rows)",
        "privacy/test_sampling.py::test_rows_are_those_of_the_draw",
    ),
    _fault(
        "gradients aren't clipped",
        "privacy/clipping.py",
        "tf.where(norms > bound, bound / norms, 1.0)",
        "tf.ones_like(norms)",
        "privacy/test_sensitivity.py",
    ),
    _fault(
        "examples that are not finite count",
        "privacy/clipping.py",
        'tf.cast(tf.math.is_finite(norms), "float32")',
        "tf.ones_like(norms)",
        "privacy/test_sensitivity.py",
    ),
    _fault(
        "the sum is divided by the rows of the padded batch",
        "privacy/clipping.py",
        "else self.rows) / self.expected_batch_size",
        "else self.rows) / self.rows",
        "privacy/test_update.py::test_equals_updates_by_hand",
    ),
    _fault(
        "XLA compiles loops over physical batches whatever is in them",
        "privacy/update.py",
        "if _by_xla(model) and not has_metrics(model) and not is_slower_in_xla_loop(model):",
        "if _by_xla(model):",
        "privacy/test_physical.py::test_xla_compiles_the_loop_where_it_can",
    ),
    _fault(
        "the sum is divided by the number of drawn rows",
        "privacy/update.py",
        "averaging(rows * replica_count())",
        "averaging(rows * model.per_example.expected_batch_size / tf.maximum(drawn, 1))",
        "privacy/test_update.py::test_equals_updates_by_hand",
    ),
    _fault(
        "noise is added for each physical batch",
        "privacy/private_model.py",
        "lambda: deviation * layer.sensitivity,",
        "lambda: (padded / split.size) ** 0.5 * deviation * layer.sensitivity,",
        "privacy/test_noise.py::test_noise_is_normal_and_independent",
    ),
    _fault(
        "each replica draws noise of its own",
        "privacy/update.py",
        "tf.identity(self.position)",
        "tf.identity(self.position) + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)",
        "privacy/test_replicas.py::test_replicas_take_the_updates_of_one_device",
    ),
    _fault(
        "the last physical batch is left out if it isn't full",
        "privacy/update.py",
        "tf.maximum(1, -(-drawn // self.size))",
        "tf.maximum(1, drawn // self.size)",
        "privacy/test_physical.py::test_physical_batches_without_drawn_rows_are_not_computed",
    ),
    _fault(
        "physical batches of fewer rows leave out drawn ones",
        "privacy/update.py",
        "-(-drawn // (batches * _ROWS))",
        "drawn // (batches * _ROWS)",
        "privacy/test_physical.py::test_rows_of_physical_batches_follow_the_draw_where_they_can",
    ),
    _fault(
        "an empty draw computes nothing, not even regularizers",
        "privacy/update.py",
        "tf.maximum(1, -(-drawn // self.size))",
        "-(-drawn // self.size)",
        "privacy/test_physical.py::test_physical_batches_without_drawn_rows_are_not_computed",
    ),
    _fault(
        "replicas count by the rows that they compute, which are made up for already",
        "engine/step/gradient.py",
        "value=tf.ones_like(self.weight.value)",
        "value=self.weight.value",
        "privacy/test_replicas.py::test_replicas_take_the_updates_of_one_device",
    ),
    _fault(
        "a layer may keep what it sees of examples",
        "privacy/clipping.py",
        "_STATEFUL[self.layer] = layers_storing_examples(self.layer, inputs)",
        "_STATEFUL[self.layer] = []",
        "privacy/test_refusals.py::test_layers",
    ),
    _fault(
        "noise goes by the bound of one layer where each has its own",
        "privacy/clipping.py",
        "return sum(bound**2 for _, bound in self.bounds()) ** 0.5",
        "return max(bound for _, bound in self.bounds())",
        "privacy/test_update.py::test_equals_updates_by_hand",
    ),
    _fault(
        "draws are read from a generator, for which TensorFlow slows the process down",
        "privacy/sampling.py",
        "tf.data.Dataset.from_tensors(0).map(update_numbers).unbatch()",
        "tf.data.Dataset.from_generator(updates, output_signature=tf.TensorSpec([], tf.int64))",
        "privacy/test_sampling.py::test_rows_are_those_of_the_draw",
    ),
    _fault(
        "metrics see the rows that fill a batch up",
        "privacy/sampling.py",
        "_MINUS_ZERO = -(2**31)",
        "_MINUS_ZERO = 1",
        "privacy/test_update.py::test_metrics_are_those_of_drawn_rows",
    ),
    _fault(
        "training goes on beyond the budget",
        "privacy/budget.py",
        "return None if self.settings.epochs is None else self.settings.epochs * self.updates_per_epoch",
        "return None",
        "privacy/test_budget.py",
    ),
    _fault(
        "a resumed epoch draws the batches that it skips for those that it trains on",
        "privacy/budget_callbacks.py",
        "self._next - self._skipped()",
        "self._next",
        "privacy/test_saving.py::test_resumed_from_our_backup_equals_undisturbed",
    ),
    _fault(
        "what loaded weights have released is forgotten",
        "privacy/releases.py",
        "            self.ledger.add(loaded)\n",
        "",
        "privacy/test_ledger.py::test_loaded_weights_bring_what_they_have_released",
    ),
    _fault(
        "noise goes by the count of updates, which loaded weights take back",
        "privacy/private_model.py",
        "                self._releases.position,\n",
        "                self._updates.value,\n",
        "privacy/test_ledger.py::test_a_key_gives_noise_to_one_update_alone",
    ),
    _fault(
        "one seed gives one key, whatever is trained",
        "privacy/releases.py",
        '"salt", event, context, iterations, released, state, attempt',
        '"salt", attempt',
        "privacy/test_ledger.py::test_another_training_has_another_key",
    ),
    _fault(
        "updates that the ledger lacks count as those of now",
        "privacy/ledger.py",
        "if damaged or (further > 0 and not entries):",
        "if damaged:",
        "privacy/test_ledger.py::test_updates_of_which_nothing_is_known",
    ),
    _fault(
        "a count beside gradients changes by one and not by one half",
        "privacy/adaptive.py",
        'votes = tf.cast(norms <= self.norm, "float32") - 0.5',
        'votes = tf.cast(norms <= self.norm, "float32")',
        "privacy/test_budget.py::test_an_adaptive_norm_is_paid_for",
    ),
    _fault(
        "updates are counted as one, at the sum of their sampling rates",
        "privacy/accounting.py",
        "float(part.updates) * rdp_of_update(part.noise_multiplier, part.sampling_rate)",
        "rdp_of_update(part.noise_multiplier, min(1.0, part.updates * part.sampling_rate))",
        "privacy/test_accounting.py::test_published_values",
    ),
    _fault(
        "epsilon is that of a larger delta",
        "privacy/accounting.py",
        "compute_epsilon(orders, total, delta)",
        "compute_epsilon(orders, total, delta**0.5)",
        "privacy/test_accounting.py::test_conversion",
    ),
    _fault(
        "updates are accounted for as if they drew all examples",
        "privacy/accounting.py",
        "max(sampling_rate, _MIN_RATE)",
        "1.0",
        "privacy/test_accounting.py::test_published_values",
    ),
    _fault(
        "divergences are as small as they round to",
        "privacy/accounting.py",
        " * (1 + _ROUNDING) + _ROUNDING / (accountant.orders - 1)",
        "",
        "privacy/test_accounting.py::test_integer_orders",
    ),
    _fault(
        "what truncation takes of delta is not multiplied by exp(epsilon)",
        "privacy/accounting.py",
        "left = delta - math.exp(bound) * truncated",
        "left = delta - truncated",
        "privacy/test_truncation.py::test_epsilon_and_what_truncation_takes_of_delta_agree",
    ),
    _fault(
        "a draw of as many others as there is place for counts as whole",
        "privacy/sampling.py",
        "first, last = max(limit,",
        "first, last = max(limit + 1,",
        "privacy/test_truncation.py::test_probability",
    ),
    _fault(
        "calibrated noise is a little too low",
        "privacy/calibration.py",
        "rtol=tolerance / 4) * (1 + tolerance / 2)\n    while excess(noise) > 0:\n        noise *= 1 + tolerance\n",
        "rtol=tolerance / 4) * (1 - tolerance / 2)\n",
        "privacy/test_accounting.py::test_noise_meets_its_target",
    ),
    _fault(
        "gradients beside a noisy count have the noise that they have without",
        "privacy/calibration.py",
        "return noise / (1 - share) ** 0.5",
        "return noise",
        "privacy/test_accounting.py::test_a_count_beside_gradients",
    ),
    _fault(
        "vectors are normalized in groups of one number",
        "privacy/batch_norm.py",
        "if _positions(layer, rank) == 1:",
        "if _positions(layer, rank) == 0:",
        "privacy/test_batch_norm.py::test_vectors_are_one_group",
    ),
]

_CUSTOM_STEPS = [
    _fault(
        "a gradient that reads updated weights is computed in the phase of the update",
        "engine/custom_step/analysis.py",
        "change.phase + by_slice",
        "change.phase",
        "custom_steps/test_custom_steps.py::test_slices[wgan]",
    ),
    _fault(
        "later phases read no weights from before an update",
        "engine/custom_step/versions.py",
        "            copy.assign(variable.value)",
        "            copy.assign(tf.zeros_like(copy))",
        "custom_steps/test_custom_steps.py::test_slices[captions]",
    ),
    _fault(
        "a number of a slice counts as much as that of the batch",
        "engine/losses/logs.py",
        "            sample_weight = self.shares[replica_index()]\n",
        "            sample_weight = None\n",
        "custom_steps/test_custom_steps.py::test_slices[autoencoder]",
    ),
    _fault(
        "losses that layers add count for the last slice alone",
        "engine/custom_step/versions.py",
        "super().__init__(states, collect_losses=True)",
        "super().__init__(states)",
        "foreign/keras_io/test_miniatures.py::test_one_device[vector_quantized-slices]",
    ),
    _fault(
        "compiled metrics are made while a step is traced",
        "engine/step/building.py",
        "if built and all(each.built for each in compiled):",
        "if built:",
        "foreign/keras_io/test_miniatures.py::test_one_device[guide-slices]",
    ),
    _fault(
        "averaged weights and counters move with every micro-batch",
        "engine/custom_step/step.py",
        "scope = None if end else",
        "scope = None if True else",
        "custom_steps/test_custom_steps.py::test_windows[diffusion]",
    ),
    _fault(
        "random numbers of a part are not those of the whole",
        "engine/probes/random_rows.py",
        "if sizes and sizes[0] == self.count:",
        "if False:",
        "custom_steps/test_custom_steps.py::test_random_numbers_of_a_step_go_from_slice_to_slice",
    ),
]

FAULTS = [
    *_ACCUMULATION,
    *_CUSTOM_STEPS,
    *_STEP,
    *_LOSSES,
    *_PER_EXAMPLE,
    *_INPUTS,
    *_DISTRIBUTION,
    *_CHECKPOINTS,
    *_PROFILING,
    *_SHARDING,
    *_PRIVACY,
]
