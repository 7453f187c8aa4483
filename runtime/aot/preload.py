"""Imported once by the process from which those that compile are forked."""

from kpipe.runtime.aot import maker

maker.warm_up()
