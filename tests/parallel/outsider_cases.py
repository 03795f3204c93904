"""Parts from outside on several devices: attention of a device's heads, a sampler, a policy."""

from tests import tiny

PARTS = {
    "attention": "tests.outsiders.attention:BOTH",
    "sampler": "tests.outsiders.sampler:with_noise",
    "eviction_policy": "tests.outsiders.policy:FOUND_LAST",
}


def test_several_devices_answer_by_parts_from_outside():
    driver = tiny.driver(**tiny.SMALL, **PARTS, tensor_parallel_size=2, data_parallel_size=2)
    prompts = tiny.prompts([24, 20, 30, 12, 25])
    for _ in range(2):  # the second time with hits
        answers = tiny.generate(driver, prompts, tiny.greedy(20))
        assert answers == [tiny.reference_answer(tuple(prompt), 20) for prompt in prompts]
