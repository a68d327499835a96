"""Evaluation and prediction on replicas: every example once, and in order."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.compiled_call import compiled_by_layer
from keras_paragrad.compat.model import has_own_predict_step, has_own_test_step
from keras_paragrad.engine.losses.logs import results_of_all, update_metrics
from keras_paragrad.engine.losses.own_logs import evaluated_by_own_step
from keras_paragrad.engine.losses.sums import LossSums, loss_sums
from keras_paragrad.engine.losses.terms import recorded_terms
from keras_paragrad.engine.losses.tracking import TrackedLosses
from keras_paragrad.engine.losses.undivided import not_divided_by_replicas
from keras_paragrad.engine.probes.independence import check_metrics
from keras_paragrad.engine.replicas.shard import Shard, rows_of
from keras_paragrad.engine.step.execution import compile_steps
from keras_paragrad.engine.step.forward import call_in_function
from keras_paragrad.engine.step.gradient_functions import releasing
from keras_paragrad.engine.step.stages import Take
from keras_paragrad.engine.step.symbolic import build_from_inputs
from keras_paragrad.storage.gathering import compiles_each_layer, gather_before_pass


def test_function(model: keras.Model, take: Take) -> Callable[[Any], dict]:
    """What to evaluate a model with, for `model.test_function`."""

    def step(data: Any) -> dict:
        if has_own_test_step(model):
            return evaluated_by_own_step(model, data, take.normalize)
        shard = Shard.of(data)
        filled = shard.filled(data)
        y_pred, sums = _evaluated(model, filled, take)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(filled)
        batch = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
        shard.run(lambda: update_metrics(model, batch))
        if take.normalize is not None:
            check_metrics(model, y, y_pred, sample_weight)
        return results_of_all(model, TrackedLosses(model, sums.only_if(shard.nonempty)))

    return compile_steps(model, [step], take=take)


def tested(model: keras.Model, data: Any) -> dict:
    """What Keras's `test_step` does, where a batch's size is static: it counts losses by it, and else doesn't."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred, sums = _losses_of(model, data, Take(), divided=True)
    TrackedLosses(model, sums).track()
    update_metrics(model, {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight})
    return model.get_metrics_result()


def predict_function(model: keras.Model, take: Take) -> Callable[[list], Any]:
    """What to predict with, for `model.predict_function`."""
    strategy = model.distribute_strategy

    def step(data: Any) -> Any:
        if has_own_predict_step(model):
            return model.predict_step(data)
        shard = Shard.of(data)
        return shard.cut(_apart(_predicted, take)(model, shard.filled(data)))

    def predicted(batch: Any) -> Any:
        outputs = strategy.run(model._autoconvert_optionals(step), args=(batch,))
        if strategy.num_replicas_in_sync == 1:
            return outputs
        return keras.tree.map_structure(lambda output: _gathered(strategy, output), outputs)

    if not model.run_eagerly:
        predicted = tf.function(releasing(predicted), reduce_retracing=True, autograph=False)

    def predict(batches: list) -> Any:
        if take.by_xla:
            # XLA can't make weights that several devices have.
            build_from_inputs(model, batches[0])
        outputs = [predicted(batch) for batch in batches]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    return predict


def _gathered(strategy: tf.distribute.Strategy, output: Any) -> Any:
    """The replicas' parts of an output, one after the other."""
    parts = strategy.experimental_local_results(output)
    if not isinstance(parts[0], tf.RaggedTensor):
        return strategy.gather(output, axis=0)
    if len(parts) < strategy.num_replicas_in_sync:
        raise ValueError(
            "The model predicts ragged tensors, which several workers can't gather. Let it predict dense ones: end it "
            "with keras.layers.Lambda(lambda x: x.to_tensor(shape=...))."
        )
    return tf.concat(parts, 0)


def _apart(function: Callable[[Any, Any], Any], take: Take) -> Callable[[Any, Any], Any]:
    if not take.by_xla or replica_count() == 1:
        return function

    def compiled(model: Any, data: Any) -> Any:
        if compiles_each_layer(model):
            with compiled_by_layer():
                return function(model, data)
        with gather_before_pass(model):
            return call_in_function(functools.partial(function, model), data)

    return compiled


def _evaluated(model: Any, data: Any, take: Take) -> tuple[Any, LossSums]:
    forms = []

    def evaluated(model: Any, data: Any) -> tuple[Any, tf.Tensor]:
        y_pred, sums = _losses_of(model, data, take)
        forms.append(sums.form)
        return y_pred, sums.vector

    y_pred, vector = _apart(evaluated, take)(model, data)
    return y_pred, LossSums(vector, forms[-1])


def _losses_of(model: Any, data: Any, take: Take, *, divided: bool = False) -> tuple[Any, LossSums]:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = _called(model, x)
    arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    with recorded_terms(model, untracked=True) as terms, not_divided_by_replicas():
        loss = model._compute_loss(**arguments, training=False)
    weight = take.normalize.in_evaluation(model, arguments, terms) if take.normalize else None
    return y_pred, loss_sums(model, loss, terms, rows_of(x), weight, divided=divided)


def _predicted(model: Any, data: Any) -> Any:
    return _called(model, keras.utils.unpack_x_y_sample_weight(data)[0])


def _called(model: Any, x: Any) -> Any:
    return model(x, training=False) if model._call_has_training_arg else model(x)
