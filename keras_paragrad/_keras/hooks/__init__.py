"""The private names of Keras and TensorFlow, and whether they are where they were."""
