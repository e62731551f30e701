"""Reward functions that change the code of their worker; workers load this file by its path."""

from multiprocessing.connection import Connection

from realign.rewards.pool import worker
from realign.rewards.pool.http import Unreachable


def patches(prompt, response, row):
    value = eval(row["value"])
    match row["target"]:
        case "as_answer":
            worker.as_answer = lambda given, expected: value
        case "answer":
            worker.answer = lambda function, item: value
        case "_answer_in_turn":
            worker._answer_in_turn = lambda function, chunk, cpu_s, memory: [value] * len(chunk)
        case "checked code":
            worker._answer_in_turn.__code__ = (lambda function, chunk, cpu_s, memory: eval(chunk)).__code__
            worker._answer_in_turn.__globals__["eval"] = lambda chunk: [value] * len(chunk)
        case "send":
            send = Connection.send
            Connection.send = lambda pipe, answers: send(pipe, value)
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
