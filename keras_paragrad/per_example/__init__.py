"""Per-example gradients, and the rules that compute them for each kind of layer."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.per_example.calls import Call as Call
    from keras_paragrad.per_example.example_gradients import ExampleGradients as ExampleGradients
    from keras_paragrad.per_example.functional import per_example_gradients as per_example_gradients
    from keras_paragrad.per_example.functional import per_example_norms as per_example_norms
    from keras_paragrad.per_example.noise_scale import GradientNoiseScale as GradientNoiseScale
    from keras_paragrad.per_example.rule import Rule as Rule
    from keras_paragrad.per_example.rule import register_rule as register_rule
    from keras_paragrad.per_example.rules.generic import Generic as Generic
    from keras_paragrad.per_example.wrapped_model import wrap as wrap
    from keras_paragrad.per_example.wrapper import PerExampleGradients as PerExampleGradients

__getattr__, __dir__, __all__ = lazily(__name__)
