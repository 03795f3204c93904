"""The serving engine, one decision after the other: what the compiled loop must do in every step.

A request runs in a row. Its prompt is computed in tiles, `tile_len` neighbouring positions counted from the
sequence's start, at most `num_tiles` of them a step; every later position is decoded, one a row and step. So
too when a preempted row is computed again: its prompt in tiles, the answer tokens it has one a step. Each
position is thus always computed in the same shape.

Requests come in the order (priority, arrival), the lower first. The order of work is that of `Engine.step`.

A beam search has 2 x width rows: in `width` of them its beams run, together or not at all, and as many hold
what has ended. The head computes the prompt, the others follow and take over its blocks when that is done.
From then on all compute a token a step, and then go on with the best continuations of all: the first from a
row stays in it, the others take the places of rows from which nothing goes on, and fork.

Several answers of one prompt are several requests, of which the first leads. A follower waits while its
leader's prompt is computed, and runs from the step on in which that is done: it takes over the blocks, and
its first token comes from the same position. If there are too few blocks then, it is a request like any
other.
"""

from dataclasses import replace

import numpy as np

from . import model
from .beam_search import BeamSearch
from .engine_blocks import Blocks, Needs, cdiv, ids, num_common
from .engine_state import EngineConfig, Group, NextToken, Phase, Request, Row, Step, draft_for, drafting_of
from .speculation import Credit
from .v1.kv_cache_utils import BlockHash


def greedy(config: model.Config, weights: model.Weights) -> NextToken:
    """Return the likeliest next token of a whole model."""
    return lambda tokens: int(np.argmax(model.logits(config, weights, tokens)[-1]))


class Engine:
    """Scheduler and loop over the rows and their blocks.

    **Nobody waits for ever.** Let a request's work be cdiv(prompt_len, tile_len) + max_new_tokens - 1 steps,
    with max_new_tokens = max_num_tokens - prompt_len. Under first-come-first-served (equal priorities) a
    request has finished after as many steps as it and those unfinished before it have work, together,
    counted from its submission. For:

    1. The running requests are always the first of all unfinished ones: preemption takes the last of them,
       admission adds the next, nobody overtakes.
    2. So either the first unfinished request runs or none does. If none does, all blocks are free, nothing
       can be preempted or waited for, and it is admitted in this step: what fits at the door fits now.
    3. The first is never preempted: all others go before it, and alone it fits.
    4. So in each step the first computes at least one tile or one later position, and keeps it. A prompt has
       cdiv(prompt_len, tile_len) tiles, and the last one's step gives the first new token; each of the others
       costs a step, be it known from before a preemption or not. Then it is gone, and the next is the first.

    With priorities 3 and 4 hold for the first unfinished request once it runs. Until then nobody is admitted,
    and the first of those running is not preempted and gets on, so that after no more steps than the running
    ones have work, together, the first unfinished one runs. So all n requests that are there finish, if no
    others come, within n times the work of all. New ones of higher priority may hold one back for ever.
    Steps in which the first one rests do not count.
    """

    def __init__(self, config: EngineConfig, next_token: NextToken) -> None:
        self.config = config
        self.next_token = next_token
        self.rows: list[Row | None] = [None] * config.num_rows
        self.blocks = Blocks(config)
        self.pool, self.host_pool = self.blocks.pools[0], self.blocks.host_pools[0]
        self.past, self.credit = config.new_past(), Credit(config.draft_cost)
        self.last_arrival: int | None = None

    # What the host may do between steps.

    def submit(self, request: Request, row: int, *more: int) -> None:
        """Put a request into a row without one, or with a finished one; a beam search into all of its rows.

        Raises: ValueError when it could never be served, or a row is in use.
        """
        config, rows = self.config, (row, *more)
        for row in rows:
            old = self.rows[row]
            if old is not None and old.phase is not Phase.FINISHED:
                raise ValueError(f"{row=} must be empty or finished, but is {old.phase.value}")
        if self.last_arrival is not None and request.arrival <= self.last_arrival:
            raise ValueError(f"{request.arrival=} must be higher than {self.last_arrival}, the last one")
        if not 0 < len(request.prompt) < request.max_num_tokens:
            raise ValueError(f"{len(request.prompt)=} must be in [1, {request.max_num_tokens=})")
        max_computed = request.max_num_tokens - 1  # the last token is never computed
        if cdiv(max_computed, config.block_size) > config.max_blocks_per_seq:
            raise ValueError(f"{request.max_num_tokens=} needs more than {config.max_blocks_per_seq=}")
        need = self.blocks.most_by_class(max_computed)
        if request.search is not None:
            need += (request.search.width - 1) * self._need_of_beam(len(request.prompt), max_computed)
        if any(need > np.array(config.pool_sizes) - 1):
            needs = " and ".join(map(str, need))
            raise ValueError(f"{request.max_num_tokens=} needs {needs} blocks, more than the pool has")
        made = [
            Row(
                row,
                replace(request, arrival=request.arrival + i),
                list(request.prompt),
                lines=self.blocks.no_blocks,
                drafting=drafting_of(request, config, self.past, self.credit),
            )
            for i, row in enumerate(rows)
        ]
        for each in made:
            self.rows[each.index] = each
        self.last_arrival = made[-1].request.arrival
        if request.search is not None:
            width, stops = request.search.width, request.stop_token_ids
            search = BeamSearch(
                request.prompt, width, request.max_num_tokens, stops, request.search.length_penalty
            )
            group = Group(search, request.search.logprobs_of, made[:width], made[width:], made[:1])
            for each in made:
                each.group = group
            for each in group.held:
                each.phase = Phase.HELD

    def abort(self, arrival: int) -> None:
        """Finish the request, whatever its phase, and free its blocks. Nothing if it has finished already.

        Of a beam search all rows.
        """
        wanted = [row for row in self._by_row() if row.request.arrival == arrival]
        for row in wanted:
            rows = [row] if row.group is None else row.group.rows + row.group.held
            for each in sorted(rows, key=lambda each: each.index):
                if each.phase is not Phase.FINISHED:
                    self.blocks.free(each)
                    each.phase, each.finish_reason = Phase.FINISHED, "abort"

    # One step.

    def step(self) -> Step:
        step = Step()

        # Shortage: the last running rows give way until the others have room.
        new, tiles_left = self._plan()
        while any(self._num_new_blocks(new) > self.blocks.num_free):
            self._preempt(self._in_phase(Phase.RUNNING)[-1], step)
            new, tiles_left = self._plan()

        # Admission in order, without overtaking.
        if not step.preempted:
            while self._admit_next(step, new, tiles_left):
                new, tiles_left = self._plan()
        for row in self._in_phase(Phase.FOLLOWING):
            head = row.group.rows[0] if row.group else row
            if head.computed < head.prompt_len == head.computed + new[head]:
                row.phase, row.forks_from, new[row] = Phase.RUNNING, head, 0

        in_prompt = [row for row, num in new.items() if num and row.computed < row.prompt_len]
        self._draft(new)

        # Blocks for the new tokens, then the tokens.
        running = [row for row in self._by_row() if row.phase is Phase.RUNNING]
        for row in running:
            self.blocks.grow(row, new[row], step)
        for row in running:
            self.blocks.write(row, new[row])
        for row in running:
            self.blocks.check(row, new[row])
            row.computed += new[row]
        step.num_new_tokens = {row.index: new[row] for row in running if new[row]}

        # A row that has computed all its tokens gets the next.
        searches = []
        for row in running:
            computed = row.computed - len(row.drafts) if row.forks_from is None else row.prompt_len
            if computed == row.num_tokens and row.group is not None:
                if row is row.group.rows[0]:
                    searches.append(row.group)
            elif computed == row.num_tokens:
                step.new_tokens[row.index] = self._choose(row)
        for row in running:
            self._settle(row, len(step.new_tokens.get(row.index, ())))
        self.credit.settle()

        # Computed blocks can be found from now on; finished rows and blocks out of the window are freed.
        computes_prompt = any(row in in_prompt for row in running)
        if computes_prompt or not self._may_wait_to_publish():
            for row in running:
                self.blocks.publish(row)
        for row in running:
            leader, row.forks_from = row.forks_from, None
            if leader is not None:
                self.blocks.fork(row, leader)
                step.forked[row.index] = leader.index
        for group in searches:
            self._go_on(group)
        for row in running:
            if row.finish_reason is not None:
                step.finished[row.index] = row.finish_reason
                row.keep_answer()
                self.blocks.free(row)
        for row in running:
            self.blocks.slide(row)

        for row in self._by_row():
            if row.blocks:
                tables = step.host_block_tables if row.phase is Phase.SWAPPED else step.block_tables
                tables[row.index] = ids(row.blocks)
        step.free_block_ids = self.blocks.free_block_ids()
        step.free_host_block_ids = self.blocks.free_block_ids(on_host=True)
        return step

    def _draft(self, new: dict[Row, int]) -> None:
        """Draft tokens for rows that decode their newest one: all of them or none, for they must not need
        more blocks than are free.
        """
        draft_for(self._in_phase(Phase.RUNNING), self.config)
        drafted = {row: num + len(row.drafts) for row, num in new.items()}
        if any(self._num_new_blocks(drafted) > self.blocks.num_free):
            for row in drafted:
                row.drafts = []
        else:
            new |= drafted

    def _choose(self, row: Row) -> list[int]:
        """Append the row's next tokens: as many as its drafts foresaw, and one."""
        choose, drafts, first = row.request.next_token or self.next_token, list(row.drafts), row.num_tokens
        while row.finish_reason is None:
            token = choose(list(row.tokens))
            row.tokens.append(token)
            if token in row.request.stop_token_ids:
                row.phase, row.finish_reason = Phase.FINISHED, "stop"
            elif row.num_tokens == row.request.max_num_tokens:
                row.phase, row.finish_reason = Phase.FINISHED, "length"
            if not drafts or drafts.pop(0) != token:
                break
        row.rests = row.request.rests is not None and row.request.rests(row.tokens)
        return row.tokens[first:]

    def _settle(self, row: Row, num_new: int) -> None:
        """Give back the positions computed behind wrong drafts, for a row that has `num_new` new tokens."""
        if row.drafting is None:
            return
        num_drafts, row.drafts = len(row.drafts), []
        num_wrong = max(row.computed - (row.num_tokens - 1), 0) if num_drafts else 0
        row.drafting.note(num_drafts, num_drafts - num_wrong, num_new)
        row.computed -= num_wrong
        for group, line in enumerate(row.lines if num_wrong else ()):
            left = cdiv(row.computed, self.config.block_size)
            self.blocks.pool_of(group).free_blocks(reversed(line[left:]))
            del line[left:]

    def _plan(self) -> tuple[dict[Row, int], int]:
        """Return how many tokens each running row would compute now, and how many tiles are left.

        Tiles are dealt out in the order of requests.
        """
        tile_len, tiles_left = self.config.tile_len, self.config.num_tiles
        new = {}
        for row in self._in_phase(Phase.RUNNING):
            new[row] = int(not row.rests)
            if row.forks_from is not None:
                new[row] = 0
            elif row.computed < row.prompt_len:
                first_tile = row.computed // tile_len
                num_tiles = min(cdiv(row.prompt_len, tile_len) - first_tile, tiles_left)
                tiles_left -= num_tiles
                end = min((first_tile + num_tiles) * tile_len, row.prompt_len)
                new[row] = end - row.computed if num_tiles else 0
        return new, tiles_left

    def _num_new_blocks(self, new: dict[Row, int]) -> Needs:
        grown = self.blocks.of_classes(
            sum(
                cdiv(row.computed + num_new, self.config.block_size) - len(row.lines[group])
                for row, num_new in new.items()
            )
            for group in range(len(self.config.reaches))
        )
        return grown + self.blocks.num_copies([row for row, num_new in new.items() if num_new])

    def _preempt(self, row: Row, step: Step) -> None:
        swaps = self.config.preemption_mode == "swap" and self.config.num_host_blocks > 0
        room = [pool.get_num_free_blocks() for pool in self.blocks.host_pools]
        swaps = swaps and all(self.blocks.num_held(row) <= room)
        if row.group is not None:
            for each in sorted(row.group.rows, key=lambda each: each.index):
                self.blocks.free(each)
                each.phase = Phase.WAITING
                step.preempted[each.index] = "recompute"
            return
        if swaps:
            step.copies_out += self.blocks.move(row, to_host=True)
            row.phase = Phase.SWAPPED
        else:
            self.blocks.free(row)
            row.phase = Phase.WAITING
            row.leave()
        row.num_preemptions += 1
        step.preempted[row.index] = "swap" if swaps else "recompute"

    def _admit_next(self, step: Step, new: dict[Row, int], tiles_left: int) -> bool:
        """Admit the first request of the queue. False if there is none, or it has to wait."""
        line = self._in_phase(Phase.WAITING, Phase.SWAPPED)
        running = self._in_phase(Phase.RUNNING, Phase.FOLLOWING)
        if not line or len(running) + line[0].width > self.config.max_num_seqs:
            return False
        row = line[0]

        leader = self._leader_in_prompt(row)
        if leader is not None:
            is_done = leader.computed + new[leader] == leader.prompt_len
            need = self._need_of_fork(row) + self._reserved(running)
            if not is_done or any(need > self.blocks.num_free):
                return False
            row.phase, row.forks_from = Phase.RUNNING, leader
            step.admitted[row.index] = 0
            return True
        if not tiles_left:
            return False

        names: list[BlockHash] = []
        hits = self.blocks.no_blocks
        if row.phase is Phase.WAITING and self.config.prefix_caching:
            names, hits = self.blocks.lookup(row)
            if self._is_worth_waiting(row, len(names)):
                return False

        # Room for all tokens that it and the running ones have. Of the hits, those within reach stay.
        num_hit_tokens = len(names) * self.config.block_size
        held = [
            sum(block.ref_cnt > 0 for block in self.blocks.read(line, reach, num_hit_tokens))
            for line, reach in zip(hits, self.config.reaches, strict=True)
        ]
        need = self.blocks.most_by_class(row.num_tokens) - self.blocks.of_classes(held)
        need += (row.width - 1) * self._need_of_beam(row.prompt_len, row.num_tokens)
        need += self._reserved(running)
        if any(need > self.blocks.num_free):
            return False

        if row.phase is Phase.SWAPPED:
            step.copies_in += self.blocks.move(row, to_host=False)
        else:
            for group, blocks in enumerate(hits):
                self.blocks.pool_of(group).touch(blocks)
            row.names, row.lines, row.computed = names, hits, num_hit_tokens
            self.blocks.slide(row)
        if row.group is not None:
            for other in row.group.rows:
                other.phase = Phase.FOLLOWING
        row.phase = Phase.RUNNING
        step.admitted[row.index] = len(names)
        return True

    def _leader_in_prompt(self, row: Row) -> Row | None:
        """Return the running row whose blocks a new request takes over when their prompt is computed."""
        if row.phase is not Phase.WAITING or row.num_tokens != row.prompt_len:
            return None
        for other in self._in_phase(Phase.RUNNING):
            if other.request.arrival == row.request.leader and other.computed < other.prompt_len:
                return other
        return None

    def _need_of_fork(self, row: Row) -> Needs:
        """Return how many blocks are needed to copy those that are partly filled with the prompt."""
        is_partly = row.prompt_len % self.config.block_size != 0
        return self.blocks.of_classes(int(is_partly) for _ in self.config.reaches)

    def _reserved(self, running: list[Row]) -> Needs:
        """Free blocks that are not for the next request: for what the running ones have, and to grow into."""
        nothing = np.zeros(len(self.blocks.pools), int)
        if not running:
            return nothing
        forking = [row for row in running if row.forks_from is not None]
        following = [row for row in running if row.phase is Phase.FOLLOWING]
        others = [row for row in running if row.forks_from is None and row not in following]
        need = sum(map(self._need_of_fork, forking), nothing) + self.blocks.num_copies(others)
        need += sum((self._need_of_beam(row.prompt_len, row.num_tokens) for row in following), nothing)
        for row in others:
            need += np.maximum(self.blocks.most_by_class(row.num_tokens) - self.blocks.num_held(row), 0)
        return need + np.array(self.config.watermark_blocks) + self.blocks.num_growing(running)

    def _need_of_beam(self, prompt_len: int, num_tokens: int) -> Needs:
        """Return the number of blocks that a beam of `num_tokens` tokens needs besides its head's.

        They are all but those that its prompt fills. With a window those may be gone when it forks.
        """
        return self.blocks.most_by_class(num_tokens) - self.blocks.sure_to_be_kept(prompt_len)

    def _is_worth_waiting(self, row: Row, num_hits: int) -> bool:
        """Return whether a running row's prompt will let this one find at least a tile more than its hits."""
        block_size = self.config.block_size
        for other in self._in_phase(Phase.RUNNING):
            if other.computed < other.prompt_len and other.request.salt == row.request.salt:
                shared = num_common(row.request.prompt, other.request.prompt)
                shared = min(shared, row.num_findable - 1) // block_size * block_size
                if shared - num_hits * block_size >= self.config.tile_len:
                    return True
        return False

    def _go_on(self, group: Group) -> None:
        """Choose the next beams of a beam search, and write them into its rows."""
        search, before = group.search, group.beam_rows
        parents = search.step([group.logprobs_of(beam.tokens) for beam in search.beams])
        sources = [before[parent] for parent in parents]
        stay = [source not in sources[:i] for i, source in enumerate(sources)]
        left = iter([row for row in group.rows if row not in sources])
        group.beam_rows = [row if stays else next(left) for row, stays in zip(sources, stay, strict=True)]
        moves = {
            row: source for row, source in zip(group.beam_rows, sources, strict=True) if row is not source
        }
        for row in sorted(moves, key=lambda row: row.index):
            self.blocks.free(row)
        for row in sorted(moves, key=lambda row: row.index):
            self.blocks.fork(row, moves[row])
        for row in left:  # without a beam: it goes on as it would alone, and counts for nothing
            row.tokens.append(int(np.argmax(group.logprobs_of(row.tokens))))
        for row, beam in zip(group.beam_rows, search.beams, strict=True):
            row.tokens = list(beam.tokens)

        former = group.ended_rows
        empty = iter([row for row in group.held if row not in [former.get(h) for h in search.ended]])
        group.ended_rows = {h: former[h] if h in former else next(empty) for h in search.ended}
        for hypothesis, row in group.ended_rows.items():
            row.tokens = list(hypothesis.tokens)
        if search.is_done or search.is_decided:
            for row in group.rows:
                row.phase, row.finish_reason = Phase.FINISHED, "length"
            for row in group.held:
                row.phase, row.finish_reason = Phase.FINISHED, "stop"

    # Order and waiting.

    def _may_wait_to_publish(self) -> bool:
        """Return whether nobody would look for blocks that only decoding has filled.

        Under their own names an answer's blocks are of use to their own request alone, and only if it gives
        way in the next step and is computed again. If even the first group has a window, its blocks must be
        published before they leave it: they are the way to all others.
        """
        num_groups = self.blocks.of_classes(1 for _ in self.config.reaches)
        is_tight = any(self.blocks.num_free < len(self._in_phase(Phase.RUNNING)) * num_groups)
        has_window = not self.config.reaches[0].is_full
        return not (self.config.reuse_answers or has_window or is_tight)

    # Rows.

    def _by_row(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def _in_phase(self, *phases: Phase) -> list[Row]:
        """Return the rows in a phase, in the order of requests."""
        return sorted(
            (row for row in self._by_row() if row.phase in phases), key=lambda row: row.request.order
        )
