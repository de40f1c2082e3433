"""A model that says with which learning rates it was updated."""

from __future__ import annotations

import keras


class One(keras.layers.Layer):
    """Gives its weight, whose gradient is 1 where the loss is the mean."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, inputs):
        return inputs * 0.0 + self.weight


class Rates(keras.callbacks.Callback):
    """Notes the rates of the updates, and the learning rates that others see."""

    def on_train_begin(self, logs=None):
        self.used, self.shown, self.before = [], [], self.weight()

    def weight(self):
        return float(keras.ops.convert_to_numpy(self.model.trainable_variables[0])[0])

    def on_train_batch_begin(self, batch, logs=None):
        self.shown.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    def on_train_batch_end(self, batch, logs=None):
        before, self.before = self.before, self.weight()
        self.used.append(before - self.before)
        self.on_train_batch_begin(batch)
