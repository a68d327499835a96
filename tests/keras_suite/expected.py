"""What becomes of Keras's own tests with a component of ours under every model, where they don't just pass."""

from typing import NamedTuple

COMPONENTS = ("microbatch", "one replica", "two replicas", "callbacks")

_TRAINER = "keras/src/trainers/trainer_test.py::TestTrainer::"
# Those that show most in the least time: graphs, sparse and ragged data, losses of a model's own.
SAMPLE = (
    f"{_TRAINER}test_fit_flow_graph_fn",
    f"{_TRAINER}test_fit_sparse_tf_graph",
    f"{_TRAINER}test_evaluate_with_custom_compute_loss",
    f"{_TRAINER}test_internal_only_loss",
    f"{_TRAINER}test_trainer_with_raggeds_functional",
)


class Reason(NamedTuple):
    """Why tests fail with a component, as they should.

    Attributes:
        what: What it is, in a line.
        words: What the error says.
        docs: The page that says so, and the words to find it by; `None` where a test looks at what has to change.
        tests: The names of the tests, by component.
    """

    what: str
    words: str
    docs: tuple[str, str] | None
    tests: dict[str, tuple[str, ...]]


REASONS = (
    Reason(
        "layers that can't be tried on ragged rows, and a loss that returns one number",
        "Nothing can be divided",
        ("guides/accumulation.md", "one of your own that can't be tried"),
        {
            "two replicas": (
                "test_trainer_with_raggeds_functional",
                "test_trainer_with_raggeds_layer",
                "test_trainer_with_raggeds_model",
            )
        },
    ),
    Reason(
        "sparse tensors that are not in order",
        "Many sparse ops require sorted indices",
        ("guides/data.md", "It takes sparse tensors in row-major order only"),
        {
            "two replicas": (
                "test_evaluate_sparse_scipy_eager",
                "test_evaluate_sparse_scipy_graph",
                "test_fit_sparse_scipy_eager",
                "test_fit_sparse_scipy_graph",
                "test_predict_sparse_scipy_eager",
                "test_predict_sparse_scipy_graph",
            )
        },
    ),
    Reason(
        "inputs that are None",
        "Spec' object has no attribute",
        ("guides/data.md", "It takes sparse tensors in row-major order only, and no `None`"),
        {
            "two replicas": ("test_functional_optional_inputs_generator_optional_none",),
        },
    ),
    Reason(
        "asks the optimizer for sparse gradients, and slices are added up in a dense tensor",
        "False is not true",
        ("guides/accumulation.md", "They are summed in a dense tensor"),
        {"microbatch": ("test_fit_sparse_scipy_graph", "test_fit_sparse_tf_graph")},
    ),
    Reason(
        "compares the names in a history, which the callbacks add to",
        "Lists differ",
        ("guides/profiling.md", "It fills `logs`, and so `History`"),
        {
            "callbacks": (
                "test_functional_deeply_nested_outputs_struct_losses",
                "test_functional_dict_outputs_dict_losses",
                "test_functional_dict_outputs_dict_losses_with_undefined_loss",
                "test_functional_dict_outputs_with_single_tensor",
                "test_functional_list_outputs_dict_losses_metrics",
                "test_functional_list_outputs_dict_losses_metrics_uniq_weighted",
                "test_functional_list_outputs_dict_losses_partial_metrics",
                "test_functional_list_outputs_invalid_nested_list_losses",
                "test_functional_list_outputs_list_losses",
                "test_functional_list_outputs_list_losses_abbr",
                "test_functional_list_outputs_nested_list_losses",
                "test_functional_list_outputs_with_custom_compute_loss",
                "test_functional_single_output_single_dict_output_1",
                "test_functional_single_output_single_dict_output_2",
                "test_functional_single_output_single_dict_output_3",
                "test_functional_single_output_single_dict_output_4",
                "test_functional_single_output_single_list_output_1",
                "test_functional_single_output_single_list_output_2",
                "test_functional_single_output_single_list_output_3",
                "test_functional_single_output_single_list_output_4",
                "test_functional_single_output_single_output_1",
                "test_functional_single_output_single_output_2",
                "test_functional_single_output_single_output_3",
                "test_functional_single_output_single_output_4",
                "test_functional_struct_outputs_dict_struct_losses_not_weighted",
                "test_functional_struct_outputs_dict_struct_losses_weighted",
                "test_functional_struct_outputs_namedtuple_struct_losses",
                "test_functional_struct_outputs_struct_losses0",
                "test_functional_struct_outputs_struct_losses1",
                "test_functional_struct_outputs_struct_losses6",
                "test_functional_struct_outputs_struct_losses7",
                "test_recompile",
            )
        },
    ),
    Reason(
        "makes a strategy of its own, which TensorFlow can't enter within the scope of another",
        "Mixing different tf.distribute.Strategy objects",
        None,
        {"two replicas": ("test_swap_ema_weights_with_tf_distribute",)},
    ),
    Reason(
        "predicts in a scope with a model that is never compiled, so that no component is under it",
        "We failed to lift variable creations out of this tf.function",
        None,
        {"two replicas": ("test_predict_flow_jit",)},
    ),
    Reason(
        "predicts in a scope with a model that is never compiled, so that no component is under it",
        "Graph execution error",
        None,
        {
            "two replicas": (
                "test_weights_sharding_efficientnet_b0_10",
                "test_weights_sharding_efficientnet_b0_512",
            )
        },
    ),
    Reason(
        "counts warnings of a model that is never compiled, of which there is one for each replica",
        "2 != 1",
        None,
        {"two replicas": ("test_warning_for_mismatched_inputs_structure",)},
    ),
)


def expected(component: str, test: str) -> Reason | None:
    """Why a test fails with a component, or `None` if it passes."""
    return next((reason for reason in REASONS if test in reason.tests.get(component, ())), None)
