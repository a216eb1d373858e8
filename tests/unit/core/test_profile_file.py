import json
import math
import re
from dataclasses import replace

import pytest

from benchmarks.builders import make_profile
from orchestrator.core.model import profile_from_json, profile_to_json


def profile_file(**changes):
    profile = make_profile(
        {"gpu": [0.1, 0.2, 0.3]}, microbatches=(1, 2), ties=((0, 2),), tie_bytes=(5.0,)
    )
    return {**json.loads(json.dumps(profile_to_json(profile))), **changes}


def test_a_profile_survives_the_file_unchanged():
    profile = make_profile(
        {"gpu": [0.1, 0.2], "cpu": [1.0, 2.0]},
        microbatches=(1, 2, 4),
        ties=((0, 1),),
        tie_bytes=(7.0,),
        step_overhead_s=0.01,
    )
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile)))) == profile
    assert "frozen_bytes" not in profile_to_json(profile)["sizes"][0]
    frozen = replace(profile, sizes=(replace(profile.sizes[0], frozen_bytes=(9.0, 0.0)),))
    assert profile_from_json(json.loads(json.dumps(profile_to_json(frozen)))) == frozen


def test_no_more_of_a_layer_is_frozen_than_it_has():
    data = profile_file()
    data["sizes"][0]["frozen_bytes"] = [0, 1e9, 0]
    with pytest.raises(ValueError, match=r"sizes\[0\]\.frozen_bytes\[1\] is 1e\+09, more than the"):
        profile_from_json(data)


def test_optional_keys_may_be_left_out():
    data = profile_file()
    for key in ("dtype", "forward_flop_per_sample", "edges", "ties", "tie_bytes"):
        del data[key]
    profile = profile_from_json(data)
    assert profile.dtype == "fp32"
    assert profile.ties == ()


def broken_time(**changes):
    data = profile_file()
    data["times"][1] |= changes
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (profile_file(schema="other/1"), "schema is 'other/1'; write 'lyray.profile/1'"),
        (
            broken_time(forward_s=[0.1, None, 0.3]),
            "times[1].forward_s[1] (layer 'layer1') is a hole",
        ),
        (broken_time(backward_s=[0.1, -2, 0.3]), "times[1].backward_s[1] (layer 'layer1') is -2"),
        (broken_time(update_s=[0.1]), "times[1].update_s has 1 entries for 3 layers"),
        (broken_time(update_s=["x", 0, 0]), "times[1].update_s[0] (layer 'layer0') is 'x'"),
        (broken_time(microbatch=0), "times[1].microbatch is 0; write a whole number"),
        (broken_time(seconds=3), "times[1].seconds is not a key"),
        (profile_file(ties=[[0, 3]]), "ties[0] is [0, 3]; write two or more unlike layer indices"),
        (profile_file(layers="abc"), "layers is 'abc'; write a list"),
        (profile_file(edges=[[1, 1]]), "edges[0] is [1, 1]; write 2 unlike layer indices"),
        (profile_file(edges=[[True, False]]), "edges[0] is [True, False]; write 2 unlike"),
        (profile_file(tie_bytes=[1.0, 2.0], ties=[[0, 1]]), "tie_bytes has 2 entries for 1 ties"),
        (profile_file(model=None), "model is None; write text"),
        (broken_time(kind=3), "times[1].kind is 3; write text"),
        (broken_time(microbatch=10**30), "write a whole number from 1 to 1000000000"),
        (broken_time(forward_s=[0, 0, 0]), "times[1].forward_s is 0 in every layer"),
        (broken_time(forward_s=[10**400, 0, 0]), "is a number of 401 digits; write a number of"),
        (broken_time(forward_s=[math.nan, 0, 0]), "(layer 'layer0') is nan; write a number of"),
        (
            broken_time(forward_s=[1e-300, 0.1, 0.1]),
            "times[1].forward_s[0] (layer 'layer0') is 1e-300; write a number of seconds, 0 or "
            "1e-12 to 1e+06",
        ),
        (broken_time(update_s=[1e17, 0, 0]), "is 1e+17; write a number of seconds, 0 or 1e-12"),
        (broken_time(backward_s=[0, 0, 0]), "times[1].backward_s is 0 in every layer"),
        (
            broken_time(forward_s=[1e-9] * 3, backward_s=[1e-9] * 3),
            "both are in seconds: measure again, or leave out the wrong row",
        ),
        (
            profile_file(forward_flop_per_sample=[1e-300] * 3),
            "forward_flop_per_sample[0] (layer 'layer0') is 1e-300; write a number of FLOP",
        ),
        (profile_file(step_overhead_s=1e9), "step_overhead_s is 1000000000.0; write a number of"),
        (profile_file(times=[*profile_file()["times"]] * 2), "stand 2 times; keep one row"),
        (profile_file(sizes=[*profile_file()["sizes"]] * 2), "the sizes of team 1 stand 2 times"),
        (
            profile_file(sizes=[profile_file()["sizes"][0] | {"team": 2}]),
            "sizes has no row of team",
        ),
        ([], "it holds no keys; write an object"),
        (3.5, "it holds no keys; write an object"),
        (profile_file(sizes=[3]), "sizes[0] is 3; write a mapping"),
        ({"schema": "lyray.profile/1"}, "model is missing from the profile; add it"),
    ],
)
def test_a_broken_file_is_refused_with_key_layer_and_mend(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        profile_from_json(data)
