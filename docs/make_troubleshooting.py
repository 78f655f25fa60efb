"""Writes docs/troubleshooting.md and its Chinese page from the rules: python docs/make_troubleshooting.py.

A test fails where one is stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl_cli.reports.diagnosis import RULES, STAGES, Rule
from agentrl_cli.reports.legend import plain

TARGET = Path(__file__).with_name("troubleshooting.md")
CHINESE = TARGET.parent / "zh" / TARGET.name

HEAD = """\
# My reward is flat, collapses, is NaN; the entropy is 0; the KL explodes

<!-- Written by docs/make_troubleshooting.py from the rules in agentrl_cli/reports/diagnosis.py; edit those. -->

```console
agentrl why
```

walks from the chat template to the evaluations of the newest training, stops at the first fault, and prints it with a
number, an episode that proves it and a command. The same rules raise the alerts of a running training, end its
output, and stand in `agentrl check`, in watch (`9`), and in reports; `train.stop_on` takes their names. Rules about
the set-up look at the steps before a fall, so that what follows from it is not taken for its cause. `agentrl why
EPISODE` gives the reasons of one episode, `agentrl show --words` explains a word of a screen.

A training that does not move says by itself what it waits for, after 30 seconds in which nothing began, ended or
advanced: the tool with its arguments, the grader, agent, server, worker, lock, disk or update, of which episode, and
since when. Watch shows it beside the running episodes (all of it under `9`), `agentrl ls runs` under the list, and
`kill -USR1 PID` prints everything that has not come back.

`agentrl train --heal` does what a fall asks for. After `nan`, `collapse`, or a drift of the policy while fewer tasks
are solved, it loads the best checkpoint (the one from which most was solved, or the best by evaluation), lowers
`train.lr` (to a third after a rise, else to a fifth) and continues; the fourth time it ends with the best weights. Each
change is stored with its step, rule and numbers, and stands in the output, `agentrl why`, `ls runs` and watch. A resume
makes the same changes. The trial: `benchmarks/README.md`, Healing.
"""
ZH_HEAD = """\
# 奖励不动、崩溃、变成 NaN，熵归零，KL 爆炸：怎么办

<!-- Written by docs/make_troubleshooting.py from the rules in agentrl_cli/reports/diagnosis.py; edit those. -->

```console
agentrl why
```

从对话模板到评测，逐项检查最近一次训练，停在第一处故障，给出数值、一个能证明它的回合，以及一条可以直接运行的命令。
训练中的警报、训练结束时的结论、`agentrl check`、watch（按 `9`）和报告用的是同一套规则；
`train.stop_on` 接受这些规则的名字。
关于设置的规则只看成绩下跌之前的步，所以后果不会被当成原因。
`agentrl why EPISODE` 说明某个回合为什么失败，`agentrl show --words` 解释屏幕上的词。下表中的英文是程序打印的原文。

训练若停住不动，30 秒后会自己说明在等什么：哪个回合的哪次工具调用（连同参数）、打分函数、智能体、服务器、
工作进程、锁、磁盘或更新，以及从什么时候开始等。watch 把它显示在正在运行的回合旁（按 `9` 看全部），
`agentrl ls runs` 显示在列表下方，`kill -USR1 PID` 会打印所有尚未返回的调用。

`agentrl train --heal` 会自己处理下跌：出现 `nan`、`collapse`，或策略偏移而成绩同时下降时，它载入最好的检查点，
降低 `train.lr`（先升后跌降到三分之一，否则五分之一）并继续；第四次则以最好的权重结束。
每次改动连同步数、规则和数值都会保存，可在输出、`agentrl why`、`ls runs` 和 watch 中看到；恢复训练时会做同样的改动。
"""
SYMPTOMS: tuple[tuple[str, str, str], ...] = (
    ("The reward is flat or 0", "奖励不动，或一直是 0",
     "stop parser malformed truncated tools arguments grader all_failed"
     " same_attempts no_signal no_gradient no_movement"),
    ("It rises, then collapses", "先升后崩", "collapse reward_hacking entropy_collapse kl_drift gradients"),
    ("Loss or gradient is NaN", "损失或梯度是 NaN", "nan gradients mismatch mask"),
    ("The entropy is near 0", "熵接近 0", "entropy_collapse same_attempts collapse"),
    ("The KL explodes", "KL 爆炸", "kl_drift clip_drift collapse mismatch"),
    ("The reward rises, the answers get worse", "奖励在涨，答案却更差", "reward_hacking grader grader_noise"),
    ("Episodes are masked or skipped", "回合被屏蔽或跳过", "errors ungraded drift too_long bad_tokens"),
    ("Good in training, not in evaluations", "训练里好，评测不好", "memorised leak few_rows off_reference"),
    ("Nothing more happens", "不再有变化", "all_solved process disk"),
)  # fmt: skip
ZH: dict[str, str] = {
    "mask": "掩码有误：梯度不属于策略",
    "drift": "回合与对话模板的渲染在结构上不同，被跳过",
    "bad_tokens": "词元编号或对数概率不可能出自这个模型",
    "mismatch": "采样端与训练端的概率不一致：检查权重和精度",
    "too_long": "提示放不进长度上限",
    "stop": "模型写了结束词元，采样却没有停：模板或分词器不对",
    "parser": "模型用的是另一种调用语法，解析器读不出来",
    "malformed": "一半以上的回合有无法解析、或与工具不符的调用",
    "truncated": "多数回合被长度上限截断",
    "errors": "基础设施出错或超时，回合被屏蔽，不参与训练",
    "tools": "工具自己出错：先看最常见的错误",
    "arguments": "参数与问题不符：模型读不懂这种问法，问题要短，参数放进引号",
    "ungraded": "主奖励返回 None，没有评分",
    "grader_noise": "同样的回合得到不同的分：评分里有随机性",
    "grader": "评分与数据里的答案不符：读错了字段，或什么都给分",
    "reward_hacking": "奖励在涨，解出率在跌：某个奖励项被钻了空子",
    "all_solved": "全部解出，没有什么可学（不是故障）",
    "same_attempts": "同一任务的尝试几乎一样：温度太低",
    "all_failed": "全部失败，没有可以强化的行为：先确认评分正确，再冷启动或换容易的数据",
    "no_signal": "没有任何一组奖励有差别，什么都没有训练",
    "nan": "损失或梯度不是数：降低学习率",
    "no_gradient": "梯度为 0：适配器没有落在模型的层上，或优势全为 0",
    "gradients": "梯度突然变大",
    "no_movement": "策略没有动：学习率太低",
    "collapse": "解出率远低于自己的最好成绩：步子太大，降低学习率，从最好的检查点继续",
    "entropy_collapse": "熵几乎为 0：策略不再尝试新东西",
    "kl_drift": "离参考模型太远，或一步走得太远",
    "clip_drift": "大量词元到了裁剪边界，不再训练",
    "leak": "评测集里有训练任务",
    "few_rows": "数据太少，学到的是答案本身",
    "memorised": "训练里变好，评测没有：记住了数据",
    "off_reference": "曲线离开了这个任务包的参考范围：先查模板、奖励和学习率",
    "process": "训练进程已经不在",
    "disk": "磁盘快满了",
}


def render() -> str:
    """The English page."""
    lines = [HEAD]
    for title, _, rules in _symptoms():
        lines += [
            f"## {title}",
            "",
            "| cause | what it prints | setting or command |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| `{r.name}` | {plain(r.text)} | {f'{plain(r.advice)} `{r.command}`'.strip()} |"
            for r in rules
        ]
        lines += [""]
    lines += ["## The walk", "", "| stage | question | rules |", "| --- | --- | --- |"]
    for stage, question in STAGES.items():
        names = dict.fromkeys(f"`{r.name}`" for r in RULES if r.stage == stage)
        lines += [f"| {stage} | {question} | {', '.join(names)} |"]
    return "\n".join(lines) + "\n"


def render_chinese() -> str:
    """The Chinese page."""
    lines = [ZH_HEAD]
    for _, title, rules in _symptoms():
        lines += [f"## {title}", "", "| 原因 | 含义 | 原文 | 命令 |", "| --- | --- | --- | --- |"]
        lines += [f"| `{r.name}` | {ZH[r.name]} | {plain(r.text)} | `{r.command}` |" for r in rules]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _symptoms() -> Iterator[tuple[str, str, list[Rule]]]:
    """Each symptom in both languages, with its rules in the order of the walk; every rule belongs to one."""
    rest = {rule.name for rule in RULES}.difference(*(names.split() for _, _, names in SYMPTOMS))
    if rest:
        raise ValueError(f"no symptom in SYMPTOMS names the rules {', '.join(sorted(rest))}")
    for english, chinese, names in SYMPTOMS:
        yield english, chinese, [rule for rule in RULES if rule.name in names.split()]


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    CHINESE.write_text(render_chinese(), encoding="utf-8")
