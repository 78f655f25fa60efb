"""Words to invent names, descriptions and values from: English, Chinese, and made of random syllables.

`HELD_OUT` are names that no invented tool has: those of the packs' tools and of the functions that
`benchmarks/bundled.py` and `agentrl doctor --model` measure with. Their parts are not words of the lists either.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

ENGLISH = tuple(
    """
    able account across active agent album alert amber angle animal answer apart apron arch area arrow asset atlas
    author badge baker balance band bank barrel basin basket battery beach beacon beam bench berry birch block blue
    board boat bone book border bottle bottom branch brave bread breeze brick bridge bright broad brook brown bucket
    budget bundle butter button cabin cable camel camera canal candle canvas captain carbon cargo carpet castle cedar
    center chain chalk channel chapter charge chart cherry chest circle clay clean clear client cliff clock cloth
    clover coast cobalt coffee color column common compass copper coral corner cotton couple course cover craft crane
    cream creek crew crop cross crown crystal current curve custom cycle daily dance dark deck deep degree delta depth
    desert design desk detail device diamond dinner direct dish distance district double dragon draw dream drift drive
    dust eagle early earth east echo edge effect elbow element empty engine entry equal event exact extra fabric factor
    falcon family farm fast feather fence fern fiber field figure filter final finger fire fleet flight floor flour
    flower focus forest formal fossil frame fresh front frost fruit fuel full garden garlic gate gentle giant ginger
    globe gold grain grand granite grape grass gravel grid ground group growth guard guest guide hammer handle harbor
    harvest hazel heart height hidden hill hollow honey horse hotel hour house hybrid index inner insect iron island
    item ivory jacket jasmine journey juice jungle kernel kettle kitchen label ladder lake lantern large layer leader
    leaf lemon length letter level light lilac limit linen link lion list local lodge long lower lunar machine magnet
    major manual maple marble margin market mass master match matrix meadow measure melon member memory metal meter
    middle mill mineral mirror mixer mobile model modern module moment month moon motor mount mouth museum music narrow
    nature nest night noble note number oasis object ocean office olive onion open orange orbit orchard order organ
    origin otter outer owner oxide packet page palace panel paper parcel park parrot partner patch path pattern pearl
    pebble pencil people pepper phase photo piano picture pilot pine pipe planet plant plate player plum pocket poem
    point polar pond portal power prime print prism profile project public pulse pump purple quartz quick quiet rabbit
    radar radio rain ranch range rapid record reef region rice ridge right ring ripple robot rocket root rose round
    route royal ruby sail salad salmon salt sample sand saturn scene school score screen season second sector seed
    segment senior series shadow shape shell shelter ship shore short side signal silk silver simple single sister
    size sketch sky sleep small smooth snow soft soil solar solid sonic source south space spare spark spice spiral
    spring square stable stage stamp star station steam steel stem storm story stream street strong studio sugar suit
    summer summit sunset surface swan sweet swift symbol system table target team temple test theater thread tiger
    tile timber toast token topic torch total tower town track trade trail train travel tree tribe trip trunk tulip
    tunnel turtle twin union unit upper urban valley value velvet vessel view village violet vision vital volume wagon
    walnut warm water wave wealth weather wheat whisper white wide willow wind window winter wire wolf wonder wood
    wool world yard year yellow young zebra zone
    """.split()
)
"""Nouns and adjectives."""

PLAIN = tuple(
    """
    about action address again ago amount apply argument arguments array ask asked assistant available away back bad
    because before being belongs below best better big boolean both brief briefly call called case celsius chance
    change character child choice choose closed cold come command compute contents csv currency data def default
    degrees description desire diameter difference direction done dry edit encoded encryption end enum error
    estimate even ever every execute expected expression fact false far few figures fine first for forecast form
    format found four free friday from function functions gain general given gives goes good gram grams guess had
    half hand hard has hash have held hello help helpful here high him his hold how humidity identifier identity
    information input insert integer into its json just keep kept kilogram kilograms kind know known last late lease
    least left less life like line lines listed liter live living look lost lot love made main many may mean means
    mine minutes missing monday more most much must near need needs never new nice none noted nothing now off often
    old once one option options other others our out over own pair parameters pay per percent person plus poor
    possible prints problem product properties property puts python quantity quest question quite ran rather real
    reference remove reply report required response rest result returns reward rich role rooms run said same saw say
    seconds see seen select sell send sent session shall shares she shop should shown since six slow solve some soon
    sort speak spent split start stay step still stop strict structure such sure taken takes talk tall tell ten term
    than thank that their them then there these they thin thing think this those three thursday time told took tools
    translate try tuesday turn type under unknown until use used user usual validate very want was way weak
    wednesday weekend weeks well went were what when where which while who whole why will wish within without word
    work worst would write written yes yet you
    """.split()
)
"""Words that prompts are full of. Names have them too: else their tokens, common as they are, are never copied."""

VERBS = tuple(
    """
    get find fetch compute read show list make build check count measure give look load send open pick join split sort
    rank map scan parse trace track estimate rate score test fill merge query return describe translate validate update
    remove insert select format round sum add list_all resolve detect extract encode decode apply
    """.split()
)

CHINESE = tuple(
    """
    时间 地点 城市 颜色 数量 编号 名称 日期 商品 订单 用户 文件 温度 速度 重量 长度 面积 总数
    结果 状态 内容 标题 类别 等级 分数 距离 高度 公司 学校 医院 机场 车站 海洋 森林 山峰 河流
    花园 房间 窗口 机器 电池 音乐 图书 电影 食物 水果 蔬菜 动物 植物 星球 月份 季节 天气 能量
    材料 金属 玻璃 木头 纸张 衣服 鞋子 帽子 钱包 银行 市场 工厂 农场 仓库 货架 箱子 袋子 瓶子
    记录 信号 频道 节目 演员 作者 读者 老师 学生 朋友 邻居 客人 队伍 比赛 规则 计划 项目 任务
    问题 答案 语言 词语 句子 段落
    """.split()
)

GLYPHS = (
    "的一是在有个上中下大小多少新旧红绿蓝黑白东西南北春夏秋冬金木水火土天地人山石田禾"
    "米竹鱼鸟马牛羊车船门户口手足心日月年星云雨雪"
)
"""Single characters for made-up Chinese words."""

HARMONY = "平 谐 气 声 弦 睦 好 温 饱 总 共 附 柔 暖 混 缓 调".split()
"""Characters that stand beside 和 inside a word, where it does not join two values."""

HELD_OUT = frozenset(
    """
    calculator search sql lookup price stock files bash
    reverse caesar count_letter weekday days_between add_days convert gcd next_prime to_hex checksum column_total
    word_count temperature postage find_line shelf_of load_of owner_of phone_of
    unit_converter calculate_math
    opening_hours parcel_status seat_of driver_of badge_of ferry_fare museum_fee
    """.split()
)
"""Names of tools that are measured with, so that no invented tool may have them."""

LINKS = "of of of between to from by with for in and at on after before per as is has".split()
"""Short words between the parts of a name."""
ALPHABET = "eeeaaaiiooutttnnssrrlhhddcmmpgfbywkvxzjq"
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def syllables(rng: random.Random, low: int = 2, high: int = 3) -> str:
    """A made-up word of so many syllables."""
    return "".join(
        rng.choice(CONSONANTS)
        + rng.choice(VOWELS)
        + (rng.choice("nrlst") if rng.random() < 0.3 else "")
        for _ in range(rng.randint(low, high))
    )


def letters(rng: random.Random) -> str:
    """A word of unusual pieces: the ends of two words joined, or letters at random.

    What a model cannot read as known words it has to copy piece by piece, as it must a stranger's names.
    """
    if rng.random() < 0.75:
        first, second = rng.choice(ENGLISH + PLAIN), rng.choice(ENGLISH + PLAIN)
        return first[: rng.randint(1, 6)] + second[-rng.randint(2, 6) :]
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randint(2, 7)))


def word(rng: random.Random) -> str:
    """An English word or a made-up one."""
    form = rng.random()
    if form < 0.5:
        return rng.choice(ENGLISH if form < 0.4 else PLAIN)
    return syllables(rng) if form < 0.7 else letters(rng)


def chinese(rng: random.Random) -> str:
    """A Chinese word or a made-up one; some have 和 inside."""
    if rng.random() < 0.08:
        beside, more = rng.choice(HARMONY), rng.choice(("", "", rng.choice(GLYPHS)))
        return (
            rng.choice((f"{beside}和", f"和{beside}")) + more
            if rng.random() < 0.6
            else f"{more}{beside}和"
        )
    return (
        rng.choice(CHINESE)
        if rng.random() < 0.6
        else "".join(rng.choice(GLYPHS) for _ in range(rng.randint(1, 3)))
    )


def words_in(name: str) -> list[str]:
    """The words of a name in snake_case or camelCase."""
    return [one.lower() for one in re.findall(r"[a-z]+|[A-Z][a-z]*", name) if one not in LINKS] or [
        name
    ]


def identifier(rng: random.Random) -> str:
    """A name for a tool: one word, a verb with a noun, snake_case or camelCase; never one of HELD_OUT."""
    while True:
        form = rng.random()
        if form < 0.06:  # it says nothing of the tool
            name = rng.choice(("f", "fn_", "tool_", "op", "cmd_", "run_", "api", "t_", "q")) + str(
                rng.randint(1, 99)
            )
        elif form < 0.35:
            name = word(rng)
        elif form < 0.75:
            name = f"{rng.choice(VERBS)}_{word(rng)}"
        elif form < 0.9:
            pattern = rng.choice(("{}_{}", "{}_{}", "{}_{}_{}", "{}_LINK", "{}_LINK_{}", "LINK_{}"))
            name = pattern.replace("LINK", rng.choice(LINKS)).format(*(word(rng) for _ in range(3)))
        else:
            name = rng.choice(VERBS).split("_")[0] + word(rng).capitalize()
        if name.lower() not in HELD_OUT:
            return name


Naming = Callable[[str, str], str]
"""The name of a tool, from the words for what it returns and what it takes."""


def name_alike(rng: random.Random) -> Naming:
    """Return how the tools of one module are named: by what they return and take."""
    form, verb = rng.random(), rng.choice(VERBS)
    link = rng.choice(("of", "of", "of", "for", "by", "in"))
    if form < 0.35:
        return lambda returns, takes: f"{returns}_{link}"
    if form < 0.6:
        return lambda returns, takes: f"{verb}_{returns}"
    if form < 0.7:
        return lambda returns, takes: f"{verb.split('_')[0]}{returns.capitalize()}"
    if form < 0.8:
        return lambda returns, takes: f"{returns}_{link}_{takes}"
    if form < 0.87:
        return lambda returns, takes: returns
    if form < 0.93:
        return lambda returns, takes: f"{takes}_{returns}"
    return lambda returns, takes: identifier(rng)
