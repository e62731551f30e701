"""Reward functions that change the code of their worker; workers load this file by its path."""

import os

import pebble.pool.process
from pebble.common import Result, ResultStatus

from realign.rewards.pool import worker
from realign.rewards.pool.http import Unreachable
from realign.rewards.pool.limits import RETIRED


def patches(prompt, response, row):
    value = eval(row["value"])
    match row["target"]:
        case "as_answer":
            worker.as_answer = lambda found, expected: value
        case "answer":
            worker.answer = lambda function, item: value
        case "_answer_pickled":
            worker._answer_pickled = lambda source, pickled: value
        case "answer_some":
            worker.answer_some.__code__ = (lambda source, pickled, slice_s, cpu_s=None: eval(pickled)).__code__
            worker.answer_some.__globals__["eval"] = lambda pickled: [value] * len(pickled)
        case "process_execute":
            pebble.pool.process.process_execute = lambda *args: Result(ResultStatus.SUCCESS, value)
    return value


def speaks(prompt, response, row):
    match row["do"]:
        case "raise":
            raise ValueError(row["text"])
        case "unreachable":
            raise Unreachable(row["text"])
    return Speaks(row["text"])


class Speaks:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def retires(prompt, response, row):
    if row["retire"]:
        os._exit(RETIRED)
    return 1.0
