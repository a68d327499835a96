"""What two workers that differ are told, case by case, in one cluster."""

import itertools
import json
import os
import time
import warnings

from runner import graphs

CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def main(names):
    """Runs the named cases; returns for each what it raised, or what it returned."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    graphs.leave_unoptimized()
    from keras_paragrad import DistributedFit

    dist = DistributedFit(startup_timeout=60)
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    found = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = CASES[name](dist, worker)
        except ValueError as error:
            found[name] = f"refused: {error}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def too_late(_=None):
    """Makes tensors before the cluster is started."""
    import keras

    from keras_paragrad import DistributedFit

    made = keras.optimizers.Adam()
    DistributedFit(startup_timeout=60)
    return type(made).__name__


def another_width(_=None):
    """Makes a model of other shapes on each worker, after which their collectives don't fit."""
    import keras

    from keras_paragrad import DistributedFit

    dist = DistributedFit(startup_timeout=60)
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with dist.scope():
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3 + worker), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
    return train(dist, made)


def data(rows=48):
    import numpy as np

    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def model(dist, activation="tanh", optimizer=None, loss="mse", **options):
    import keras

    with dist.scope():
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation), keras.layers.Dense(1)])
        made.compile(optimizer or keras.optimizers.SGD(0.1), loss, **options)
    return made


_SHARED = []


def shared(dist):
    """A model that is compiled once, as it was made."""
    if not _SHARED:
        # Each collective of an eager step waits for the other worker to look it up, longer than tracing takes.
        made = model(dist, jit_compile=False)
        _SHARED.extend((made, made.get_weights()))
    made, weights = _SHARED
    made.set_weights(weights)
    made.optimizer.learning_rate = 0.1
    made.optimizer.iterations.assign(0)
    return made


def train(dist, made=None, rows=48, **options):
    history = dist.fit(made or shared(dist), *data(rows), **{"epochs": 2, "verbose": 0, "batch_size": 16, **options})
    return {"loss": history.history["loss"], "norm": [float(abs(each).sum()) for each in history.model.get_weights()]}


@case
def a_second_start(dist, worker):
    from keras_paragrad import DistributedFit

    began = time.monotonic()
    try:
        DistributedFit(startup_timeout=5)
    except RuntimeError as error:
        return {"said": str(error), "at once": time.monotonic() - began < 4}


@case
def another_activation(dist, worker):
    return train(dist, model(dist, "relu" if worker else "tanh"))


@case
def weights_loaded_on_one(dist, worker):
    made = shared(dist)
    if worker:
        made.layers[0].kernel.assign(made.layers[0].kernel * 1.01)
    return train(dist, made)


@case
def prepared_and_other_epochs(dist, worker):
    made = model(dist)
    dist.prepare(made)
    return made.fit(*data(), batch_size=16, epochs=1 + worker, verbose=0).history


@case
def a_rate_that_one_changes_behind_the_back(dist, worker):
    import keras

    class Hidden(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            _change(self.model.optimizer, 0.1 + worker)

    return train(dist, callbacks=[Hidden()])


def _change(optimizer, rate):
    optimizer.learning_rate = rate


@case
def weights_that_one_changes_behind_the_back(dist, worker):
    import keras

    class Hidden(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if worker:
                _assign(self.model.layers[0].kernel)

    return train(dist, callbacks=[Hidden()])


def _assign(variable):
    variable.assign(variable * 1.01)


@case
def fewer_batches(dist, worker):
    x, y = data()

    def batches():
        for number in itertools.count():
            if number == 3 - worker:
                return
            yield x[16 * number : 16 * number + 16], y[16 * number : 16 * number + 16]

    return dist.fit(shared(dist), batches(), epochs=1, verbose=0).history


@case
def larger_batches(dist, worker):
    import keras

    x, y = data()

    class Batches(keras.utils.PyDataset):
        num_batches = 3

        def __getitem__(self, index):
            rows = slice(16 * index, 16 * index + 16 - 2 * worker * (index > 0))
            return x[rows], y[rows]

    return dist.fit(shared(dist), Batches(), epochs=1, verbose=0).history


# What may differ.


@case
def what_may_differ(dist, worker):
    """A progress logger, paths, names, lambdas' addresses, seeds and verbosity."""
    import tempfile

    import keras

    class Shown(keras.callbacks.Callback):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank
            self.rates = []

        def on_epoch_end(self, epoch, logs=None):
            self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    if worker:
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).compile("adam", "mse")
    folder = tempfile.mkdtemp()
    kept = keras.callbacks.ModelCheckpoint(f"{folder}/{worker}.keras", verbose=worker)
    lines = []
    spoken = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: lines.append(epoch))
    log = keras.callbacks.CSVLogger(f"{folder}/log.csv")
    board = keras.callbacks.TensorBoard(f"{folder}/{worker}")
    own = [Shown(worker), kept, keras.callbacks.TerminateOnNaN()]
    with dist.scope():
        keras.utils.set_random_seed(1)
        i = keras.Input((4,))
        h = keras.layers.Dense(3, lambda x: x / 2)(i)
        h = keras.layers.Dropout(0.0, seed=worker)(h)
        made = keras.Model(i, keras.layers.Dense(1)(keras.layers.Add()([h, h * 2])))
        made.compile(keras.optimizers.SGD(0.1), lambda y, z: (y - z) ** 2)
    return train(dist, made, callbacks=[*own, board] if worker else [spoken, log, *own], verbose=0)


@case
def prepared_with_arrays(dist, worker):
    import keras
    import numpy as np

    x, y = data(50)
    expected = dist.fit(shared(dist), x, y, batch_size=16, epochs=2, verbose=0, seed=5).history
    made = shared(dist)
    # Of its own, each worker would draw another order; the first one's counts.
    keras.utils.set_random_seed(5 + worker)
    history = made.fit(x, y, batch_size=16, epochs=2, verbose=0).history
    evaluated = made.evaluate(x, y, batch_size=16, verbose=0)
    alone = float(np.mean(np.square(made(x).numpy() - y)))
    return {
        **history,
        "loss of dist.fit": expected["loss"],
        "evaluated": evaluated,
        "evaluated by one device": alone,
    }


def pipeline():
    """A model that reads its data itself, as keras_hub's tasks do."""
    import keras
    import tensorflow as tf

    class Pipeline(keras.Model):
        def prepared(self, x, y=None, batch_size=None):
            data = tf.data.Dataset.from_tensor_slices((x,) if y is None else (x, y)).batch(batch_size or 32)
            return data.map(lambda x, *y: (x / 2, *y), num_parallel_calls=tf.data.AUTOTUNE)

        def fit(self, x=None, y=None, batch_size=None, validation_data=None, **kwargs):
            if validation_data is not None:
                validation_data = self.prepared(*validation_data, batch_size)
            return super().fit(self.prepared(x, y, batch_size), validation_data=validation_data, **kwargs)

        def evaluate(self, x=None, y=None, batch_size=None, **kwargs):
            if not kwargs.get("_use_cached_eval_dataset"):
                x, y = self.prepared(x, y, batch_size), None
            return super().evaluate(x, y, **kwargs)

        def predict(self, x=None, batch_size=None, **kwargs):
            return super().predict(self.prepared(x, batch_size=batch_size), **kwargs)

    keras.utils.set_random_seed(1)
    i = keras.Input((4,))
    made = Pipeline(i, keras.layers.Dense(1)(keras.layers.Dense(3, "tanh")(i)))
    made.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return made


def results_of_pipeline(fit, made):
    """What it has come to, of 50 rows."""
    x, y = data(50)
    history = fit(x, y, batch_size=16, epochs=2, validation_data=(x[:20], y[:20]), verbose=0).history
    return {
        **history,
        "evaluated": made.evaluate(x, y, batch_size=16, verbose=0),
        "predicted": made.predict(x, batch_size=16, verbose=0)[:, 0].tolist(),
        "norm": [float(abs(each).sum()) for each in made.get_weights()],
    }


@case
def a_model_with_a_fit_of_its_own(dist, worker):
    with dist.scope():
        made = pipeline()
    return results_of_pipeline(lambda *data, **options: dist.fit(made, *data, **options), made)


# What is tried on made-up rows before the first step.


def own_parts(scope):
    """A model with a layer and a metric that Keras does not know, and with replicas that meet in the forward pass."""
    import keras
    from keras import layers, ops

    class Centered(layers.Layer):
        def build(self, input_shape):
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

        def call(self, inputs):
            self.seen.assign_add(ops.sum(inputs) / 48)
            return inputs - ops.mean(inputs, 1, keepdims=True)

    def distance(y_true, y_pred):
        return ops.abs(y_true - y_pred)

    with scope:
        keras.utils.set_random_seed(1)
        synchronized = layers.BatchNormalization(synchronized=True)
        made = keras.Sequential(
            [keras.Input((4,)), layers.Dense(3), synchronized, Centered(name="own"), layers.Dense(1)]
        )
        made.compile(keras.optimizers.SGD(0.1), "mse", metrics=[distance], jit_compile=False)
    return made


@case
def parts_of_its_own(dist, worker):
    made = own_parts(dist.scope())
    return results_of(lambda *data, **options: dist.fit(made, *data, **options), made)


def results_of(fit, made):
    """What training and evaluation come to."""
    history = fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    norms = [float(abs(each).sum()) for each in made.get_weights()]
    return {**history, "evaluated": made.evaluate(*data(), batch_size=16, verbose=0), "norms": norms}


# Stops.


def stops_in(hook, after=0):
    """A callback that stops in a hook, when it has an index."""
    import keras

    def stop(callback, index, logs=None):
        if index == after:
            setattr(callback.model, "stop_evaluating" if "test" in hook else "stop_training", True)

    return type("Stops", (keras.callbacks.Callback,), {hook: stop})()


def steps_of(dist, callbacks, epochs=3, **options):
    made = shared(dist)
    history = dist.fit(
        made, *data(), batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks, **options
    ).history
    return {"steps": int(made.optimizer.iterations.numpy()), "epochs": len(history["loss"])}


@case
def a_stop_of_one_worker_in_evaluation_and_after_an_epoch(dist, worker):
    stops = [stops_in("on_epoch_end", 1), stops_in("on_test_batch_end")]
    return steps_of(dist, stops if worker else [], validation_data=data())


@case
def a_stop_of_one_worker_after_a_batch(dist, worker):
    return steps_of(dist, [stops_in("on_train_batch_end", 1)] if worker else [])


@case
def a_stop_of_one_worker_before_an_epoch(dist, worker):
    return steps_of(dist, [] if worker else [stops_in("on_epoch_begin")])


@case
def not_a_number(dist, worker):
    import keras
    import numpy as np

    x, y = data()
    x[20] = np.nan
    made = shared(dist)
    dist.fit(
        made, x, y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    return int(made.optimizer.iterations.numpy())


@case
def nothing_to_compare(dist, worker):
    """As of a model that is all in shards, with a schedule for its rate."""
    import numpy as np

    from keras_paragrad.compat.workers import gather

    return gather(dist.strategy, np.zeros((0, 2))).shape


@case
def no_end_before_others_have_read(dist, worker):
    """How many barriers follow the last collective of what workers do together."""
    import keras
    import numpy as np
    from tensorflow.python.eager.context import Context

    from keras_paragrad import DistributedFit
    from keras_paragrad.compat.workers import gather
    from keras_paragrad.distribution.workers import broadcast_bytes

    class Restarts(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            passed.clear()

        on_test_end = on_predict_end = on_train_end

    shards = DistributedFit(dist.strategy, shard="parameters", min_shard_bytes=1)
    with shards.scope():
        cut = keras.Variable(np.ones(6, "float32"))
    made, (x, y), passed, wait = shared(dist), data(), [], Context.wait_at_barrier

    def noted(context, *arguments):
        wait(context, *arguments)
        passed.append(arguments)

    Context.wait_at_barrier = noted
    once = {"batch_size": 16, "verbose": 0, "callbacks": [Restarts()]}
    ways = {
        "fit": lambda: dist.fit(made, x, y, **once),
        "fit of the model": lambda: made.fit(x, y, **once),
        "evaluate": lambda: made.evaluate(x, y, **once),
        "predict": lambda: made.predict(x, **once),
        "gather": lambda: gather(dist.strategy, [1.0]),
        "broadcast_bytes": lambda: broadcast_bytes(dist.strategy, None if worker else b"content"),
        "a variable in shards": cut.numpy,
    }
    found = {}
    try:
        for name, do in ways.items():
            passed.clear()
            do()
            found[name] = len(passed)
    finally:
        Context.wait_at_barrier = wait
        # The strategy makes whole variables again.
        DistributedFit(dist.strategy)
    return found
