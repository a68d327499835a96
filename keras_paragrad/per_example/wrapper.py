"""`PerExampleGradients`: a layer wrapper that computes per-example gradients during training."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_choice, check_function, check_instance, check_integer, check_number
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.delegation import layer_metrics, uncompile, warn_on_fit
from keras_paragrad.compat.layers import compiled_by_xla, may_be_differentiated
from keras_paragrad.compat.model import all_layers, count_after
from keras_paragrad.compat.types import Config, GradientTensor, Shape, Structure
from keras_paragrad.engine.step.building import build_by_calling, has_build
from keras_paragrad.engine.tracing.announcing import announcing
from keras_paragrad.engine.tracing.gradient_functions import keep_with_graphs_of
from keras_paragrad.engine.trials.trial import is_trial
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.results import StepResults, check_capacity, default_capacity
from keras_paragrad.per_example.step import CapturedCall, LossRecord

QUANTITIES = ("norms", "gradients", "second_moment")
REDUCTIONS = ("sum_over_batch_size", "sum")
_TRANSFORM = "lambda norms: tf.cast(norms < 10.0, 'float32')"
# Most calls that may be waiting for a backward pass; some never get one.
_MOST_PENDING_STEPS = 16


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PerExampleGradients(keras.layers.Wrapper):
    """Wraps a layer or a whole model so that `fit` computes per-example gradients or norms, or clips per example.

    They are computed in the ordinary backward pass of each training step. They are gradients of each example's own
    loss: not divided by the batch size or the replica count, without loss scale and weight regularizers. Their mean is
    the gradient that `fit` applies (their sum, for a loss with `reduction="sum"`). An example's sample weight is part
    of its loss. Without `clip_norm` or `transform`, the wrapper does not change training.

    Args:
        layer: A layer or a model, called once per step; its sublayers may be shared.
        quantity: What to keep of each step: `"norms"`, `"gradients"` or `"second_moment"`.
        clip_norm: Largest norm of an example's gradient in the update; larger gradients are scaled down to it. Norms
            and the clipped sum take one backward pass. An example whose norm is not finite, such as with a NaN in its
            data, contributes nothing to the update.
        transform: Instead of `clip_norm`, a function from the norms, a float32 tensor `(count,)`, to the weight of each
            example's gradient in the update, of the same shape, for importance sampling or filtering.
        capacity: Most examples per batch on each device. XLA needs it for its static shapes to compile steps with
            `quantity="gradients"`; without it, `jit_compile="auto"` does not use XLA for them. The default for norms is
            16384.
        loss_reduction: `"sum_over_batch_size"` or `"sum"`: how a loss that is not passed to `compile` reduces over the
            examples of a batch. In a custom training loop the default is to average.
        **kwargs: Arguments of `keras.layers.Layer`.

    Attributes:
        count: Number of examples in the last step, on all local replicas together.
        norms: Global norms of their gradients before clipping, float32 `(count,)`; with `quantity="norms"`, `clip_norm`
            or `transform`.
        nonfinite_count: How many of the norms are not finite.
        gradients: With `quantity="gradients"`, a list in the order of the layer's `trainable_variables`, each float32
            `(count, *shape)`.
        second_moment: With `quantity="second_moment"`, a list in the same order of the squared gradients, summed over
            examples, in the weights' shapes.

    Raises:
        ValueError: An argument is invalid; or, when a step is built, per-example gradients don't exist: batch
            normalization in training, a loss that mixes examples, a second call. The message says what to write.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import PerExampleGradients
    >>> layer = PerExampleGradients(keras.layers.Dense(1))
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu"), layer])
    >>> model.compile("adam", loss="mse")
    >>> history = model.fit(np.ones((100, 8)), np.ones((100, 1)), batch_size=32, verbose=0)
    >>> layer.norms.shape
    (4,)

    References:
        Goodfellow, Efficient per-example gradient computations, https://arxiv.org/abs/1510.01799;
        Lee and Kifer, Scaling up differentially private deep learning, https://arxiv.org/abs/2009.03106;
        Bu et al., Differentially private optimization on large models, https://arxiv.org/abs/2210.00038 (one pass).
    """

    # Records cotangents from the forward pass on: see `keras_paragrad.compat.compiled_call`.
    needs_whole_pass = True
    # Rules have not been compared with one device on a mesh.
    trains_on_meshes = False

    def __init__(
        self,
        layer: keras.layers.Layer,
        quantity: str = "norms",
        clip_norm: float | None = None,
        transform: Callable[[tf.Tensor], tf.Tensor] | None = None,
        *,
        capacity: int | None = None,
        loss_reduction: str | None = None,
        **kwargs: Any,
    ):
        check_internals("models")
        check_instance("layer", layer, keras.layers.Layer, "a Keras layer or model", example="keras.layers.Dense(10)")
        quantity = check_choice("quantity", quantity, QUANTITIES)
        clip_norm = check_number("clip_norm", clip_norm, above=0, finite=False, example=1.0, optional=True)
        check_function(
            "transform", transform, what="a function from norms to weights", example=_TRANSFORM, optional=True
        )
        capacity = check_integer("capacity", capacity, most=2**31 - 1, example=256, optional=True)
        loss_reduction = check_choice("loss_reduction", loss_reduction, (*REDUCTIONS, None))
        if clip_norm is not None and transform is not None:
            raise ValueError(
                "`clip_norm` and `transform` both scale the examples' gradients. Pass only one: clipping is "
                f"transform=lambda norms: tf.minimum(1.0, {clip_norm} / norms)."
            )
        if any(isinstance(inner, PerExampleGradients) for inner in (layer, *all_layers(layer))):
            raise ValueError(
                f"{layer.name!r} contains a PerExampleGradients layer. Remove one of the two: the outer one has the "
                "gradients of all weights."
            )
        # The wrapper itself is float32; casting inputs and weights is left to the wrapped layers.
        super().__init__(layer, **{"dtype": "float32", "autocast": False, **kwargs})
        self.supports_masking = layer.supports_masking
        self.quantity = quantity
        self.clip_norm = clip_norm
        self.transform = transform
        self.capacity = capacity
        self.loss_reduction = loss_reduction
        self.supports_jit = quantity != "gradients" or capacity is not None
        # Bypasses Keras's attribute tracking: a step's results are not model state and are not saved.
        pending_steps = collections.defaultdict(functools.partial(collections.deque, maxlen=_MOST_PENDING_STEPS))
        self.__dict__.update(_results=None, _steps=pending_steps, _note_graph=keep_with_graphs_of(self))
        if self.reweights and isinstance(layer, keras.Model):
            warn_on_fit(
                layer,
                f"{layer.name!r} is wrapped with {'transform' if clip_norm is None else 'clip_norm'}=..., and its own "
                "fit does not scale the examples' gradients. Compile and fit the model that contains the wrapper: "
                "wrapped = wrap(model, ...), then wrapped.compile(...) and wrapped.fit(...).",
            )

    def build(self, input_shape: Shape | None = None) -> None:
        if has_build(self.layer):
            super().build(input_shape)
        else:
            # The sublayers of the wrapped layer are built in its first call.
            self.built = True
        self._allocate(self.capacity)

    def call(self, inputs: Structure, *args: Any, **kwargs: Any) -> Structure:
        """Calls the wrapped layer; in training it records what per-example gradients are computed from."""
        if "mask" in kwargs and all(argument is None for argument in keras.tree.flatten(kwargs["mask"])):
            # Keras passes one for nested inputs even if there is none, and not every layer takes it.
            del kwargs["mask"]
        # A trial computes plain gradients, and must leave no step behind.
        is_step = may_be_differentiated() and not is_trial()
        if is_step:
            build_by_calling(self.layer, inputs)
        self._allocate(self.capacity or default_capacity(self.stored))
        if not is_step:
            return self.layer(inputs, *args, **kwargs)
        check_capacity(self.stored, self.capacity)
        if not tf.executing_eagerly():
            self._note_graph()
        # The optimizer counts an update only once its batch exists.
        count_after(keras.tree.flatten(inputs))
        loss = LossRecord(self.loss_reduction)
        captured = CapturedCall(self.layer, self._finish, self._replaces_gradients(), loss)
        self._steps[replica_index()].append(captured)
        with announcing("tracing the gradients of single examples"):
            outputs = captured(inputs, *args, **kwargs)
        for added_loss in captured.capture.reads.losses:
            self.add_loss(added_loss)
        return outputs

    @property
    def count(self) -> int:
        return 0 if self._results is None else int(self._results.count.numpy())

    @property
    def norms(self) -> np.ndarray:
        return self._stored("norms").numpy()

    @property
    def nonfinite_count(self) -> int:
        return int(np.sum(~np.isfinite(self.norms)))

    @property
    def gradients(self) -> list[np.ndarray]:
        return [rows.numpy() for rows in self._stored("gradients")]

    @property
    def second_moment(self) -> list[np.ndarray]:
        return [total.numpy() for total in self._stored("second_moment")]

    @property
    def metrics(self) -> list[keras.Metric]:
        # A wrapped model is not the one being trained, even if it was compiled before.
        return layer_metrics(self.layer)

    def compute_mask(self, inputs: Structure, previous_mask: Structure = None) -> Structure:
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "quantity": self.quantity,
            "clip_norm": self.clip_norm,
            "transform": keras.saving.serialize_keras_object(self.transform),
            "capacity": self.capacity,
            "loss_reduction": self.loss_reduction,
        }

    @classmethod
    def from_config(cls, config: Config, custom_objects: dict[str, type] | None = None) -> "PerExampleGradients":
        config = dict(config)
        config["transform"] = keras.saving.deserialize_keras_object(config["transform"], custom_objects)
        wrapper = super().from_config(config, custom_objects)
        # The wrapped model is not trained itself: its optimizer would only look for its state in the file.
        uncompile(wrapper.layer)
        return wrapper

    @property
    def reweights(self) -> bool:
        """Whether the layer changes the examples' weights in the update."""
        return self.clip_norm is not None or self.transform is not None

    @property
    def stored(self) -> set[str]:
        """The results stored by each step: the `quantity`, and the norms if the update needs them."""
        return {self.quantity, "norms"} if self.reweights else {self.quantity}

    def sum_of_squared_norms(self) -> tf.Tensor:
        """Within a step: the sum of the squared norms of this replica's examples, a float32 scalar."""
        return self._stored("norms").sum_of_squares()

    def _allocate(self, capacity: int | None) -> None:
        """Creates the variables for the results of steps of up to `capacity` examples, unless they exist."""
        results: Any = self._results
        variables = self.layer.trainable_variables
        if results and len(results.variables) == len(variables) and (results.capacity or 0) >= (capacity or 0):
            return
        with tf.init_scope():
            self.__dict__["_results"] = StepResults(self.stored, variables, capacity)

    def _stored(self, name: str) -> Any:
        """What `StepResults` stores of the last step under a name; refuses a name that isn't stored."""
        if name not in self.stored:
            raise ValueError(
                f"This layer keeps {' and '.join(sorted(self.stored))}, not {name}. Write "
                f"PerExampleGradients(..., quantity={name!r})."
            )
        if self._results is None:
            raise ValueError(f"There are no {name} before the layer is built. Call or fit the model first.")
        return getattr(self._results, name)

    def _finish(self, call: CapturedCall) -> list[GradientTensor | None]:
        """Called after the backward pass through the layer: stores its results, and returns the weights' gradients."""
        # Replicas may run a collective between the forward and the backward pass, so each keeps its own calls.
        steps = self._steps[replica_index()]
        for pending in steps:
            pending.loss.close()
        # Earlier calls are dropped, and raise an error if the backward pass reaches them too.
        steps.clear()
        steps.append(call)
        quantities = Quantities(call.capture.recorded, self.layer.trainable_variables)
        factor = call.loss.factor(quantities)
        norms = self._results.assign(quantities, factor)
        # The plain gradients are kept.
        if not call.skip_plain_gradients:
            return [None] * len(quantities.variables)
        if not self.reweights:
            return quantities.weighted_sums(tf.ones(tf.reshape(quantities.batch, [1])))
        return self._reweighted_gradients(quantities, norms, factor, call)

    def _reweighted_gradients(
        self, quantities: Quantities, norms: tf.Tensor, factor: tf.Tensor, call: CapturedCall
    ) -> list[GradientTensor | None]:
        """Each weight's sum of reweighted per-example gradients, or `None`.

        `factor` scales norms in `quantities` to norms for each example's own loss, as `norms` are.
        """
        call.loss.warn_of_masks()
        return quantities.weighted_sums(self._example_weights(norms, call), norms)

    def _replaces_gradients(self) -> bool:
        """Whether the update is summed from the per-example gradients, rather than left to the plain backward pass.

        Under XLA this saves computing the plain gradient. Without XLA, and in half precision, where the plain gradient
        is faster, the unweighted update stays bitwise equal to the plain one.
        """
        if self.reweights:
            return True
        layers = (self.layer, *all_layers(self.layer))
        dtypes = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in layers}
        return compiled_by_xla() and dtypes <= {"float32", "float64"}

    def _example_weights(self, norms: Any, call: CapturedCall) -> tf.Tensor:
        """Each example's weight in the update."""
        if self.transform is None:
            finite = tf.where(norms > self.clip_norm, self.clip_norm / norms, 1.0)
            # If the loss scale may be the cause, NaN makes its optimizer skip the update and lower the scale.
            nonfinite = tf.where(call.loss.may_overflow(tf.shape(norms)[0]), float("nan"), 0.0)
            return tf.where(tf.math.is_finite(norms), finite, nonfinite)
        weights: Any = tf.convert_to_tensor(self.transform(norms))
        if weights.shape.rank != 1:
            raise ValueError(
                f"`transform` returned a tensor of shape {weights.shape} for norms of shape {norms.shape}, and must "
                "return one weight per norm."
            )
        return tf.cast(weights, "float32")
