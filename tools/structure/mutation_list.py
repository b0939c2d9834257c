"""The mutations: (text in the package, its replacement, the test that fails)."""

MUTATIONS: list[tuple[str, str, str]] = [
    (
        "decay_steps = max(1, total_num_steps - max(2, warmup_num_steps))",
        "decay_steps = max(1, total_num_steps)",
        "test_warmup_decay_lr[log]",
    ),
    (
        "jnp.log(jnp.maximum(1, k + 1)) / math.log(warmup_num_steps)",
        "jnp.log(jnp.maximum(1, k)) / math.log(warmup_num_steps)",
        "test_warmup_lr[log]",
    ),
    (
        "return base_lr * jnp.where(k < 0, 0, ratio)",
        "return base_lr * ratio",
        "test_warmup_cosine_lr[log]",
    ),
    (
        "lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)",
        "lr_range_test_min_lr * (lr_range_test_step_rate * interval)",
        "test_lr_range_test[False]",
    ),
    (
        "return jnp.where(step == 0, cycle_min_mom, b1), 0.99",
        "return b1, 0.99",
        "test_one_cycle[decay0-plain]",
    ),
    (
        "hysteresis_left=jnp.where(falls, left, left - 1)",
        "hysteresis_left=jnp.where(falls, full, left - 1)",
        "test_trajectories_equal_the_reference",
    ),
    (
        "rises = (state.good_steps > 0) & (state.good_steps % rule.window == 0)",
        "rises = state.good_steps % rule.window == 0",
        "test_trajectories_equal_the_reference",
    ),
    (
        "return jnp.minimum(1, max_norm / (norm + _EPS))",
        "return max_norm / (norm + _EPS)",
        "test_smaller_norms_and_a_limit_of_zero_change_nothing[5.1]",
    ),
    (
        "return optax.incremental_update(params, ema, 1.0 - decay)",
        "return optax.incremental_update(params, ema, decay)",
        "test_the_average_is_the_sum_of_all_past_weights",
    ),
    (
        "return max(1.0, tall / wide) ** 0.5",
        "return max(1.0, wide / tall) ** 0.5",
        "test_muon_updates_hidden_matrices_and_adam_the_rest[rates0-0.03-0.03-gram]",
    ),
    (
        "gram = times(times(p, gram), p) if i + 1 < iterations else gram",
        "gram = times(p, gram) if i + 1 < iterations else gram",
        "test_muon_updates_hidden_matrices_and_adam_the_rest[rates0-0.03-0.03-gram]",
    ),
    (
        "normalized *= scale * norm / jnp.maximum(new, 1e-8)",
        "normalized *= scale",
        "test_normuon_equals_its_formula[nesterov]",
    ),
    (
        "nu = jnp.take(nu, order, axis=dim)",
        "nu = jnp.asarray(nu)",
        "test_soap_equals_its_reference_in_numpy",
    ),
    (
        "[parts.rate(lr, first=1), parts.rate(lr)]",
        "[parts.rate(lr), parts.rate(lr)]",
        "test_soap_equals_its_reference_in_numpy",
    ),
    (
        "return leaf.stacked + (experts_dim(leaf) == (leaf.stacked,))",
        "return leaf.stacked",
        "test_experts_are_matrices_and_routers_are_not",
    ),
    (
        "share = jnp.where(state.step == 0, 1, 1 - dampening)",
        "share = jnp.asarray(1 - dampening)",
        "test_updates_equal_the_formula[sgd with dampening]",
    ),
    (
        "slower = 1 + state.step * lr_decay",
        "slower = 1 + (state.step + 1) * lr_decay",
        "test_updates_equal_the_formula[adagrad with lr_decay]",
    ),
    (
        "return 0.0 if group.frozen else group.lr_factor",
        "return group.lr_factor",
        "test_the_first_group_that_matches_gives_factor_and_decay",
    ),
    (
        'growth = stored[dim] / shape[dim] - 1 + RELUCTANCE.get(names[dim] or "", 0.0)',
        "growth = stored[dim] / shape[dim] - 1",
        "test_the_stack_of_layers_is_cut_only_to_save_a_quarter",
    ),
    (
        "stored[dim] = -(-shape[dim] // parts) * parts",
        "stored[dim] = shape[dim] // parts * parts",
        "test_a_vocabulary_that_does_not_divide_is_padded_to_the_next_multiple[0]",
    ),
    (
        'REPLICATED = ("kv_heads",)',
        "REPLICATED: tuple[str, ...] = ()",
        "test_key_heads_that_do_not_divide_are_replicated_with_a_note",
    ),
    (
        "full[free[0]] = device_count // fixed",
        "full[free[0]] = device_count",
        "test_a_free_axis_takes_what_is_left",
    ),
    (
        "return sorted(AXES, key=lambda name: AXES[name].near)",
        "return sorted(AXES, key=lambda name: -AXES[name].near)",
        "test_the_axis_that_communicates_least_goes_across_slices",
    ),
    (
        "if axis.stores and name not in _axes_in(spec))",
        "if axis.stores)",
        "test_what_the_axes_of_the_table_do",
    ),
    (
        "return self.stacked and self.chunks == 1",
        "return self.stacked",
        "test_other_stacks_keep_the_names_of_their_dims[chunks]",
    ),
    (
        "if length < 2:",
        "if length < 3:",
        "test_a_member_that_is_other_than_its_neighbours_ends_the_run",
    ),
    (
        "round_start = i // K * v * K + i % K",
        "round_start = i // K * v * K + i",
        "test_gpipe_runs_all_forwards_first",
    ),
    (
        "return forward, M + K - 1 + i + (K - 1 - s)",
        "return forward, M + K + i + (K - 1 - s)",
        "test_gpipe_runs_all_forwards_first",
    ),
    (
        "read_before = np.cumsum(backward.busy, axis=0) - backward.busy",
        "read_before = np.cumsum(backward.busy, axis=0)",
        "test_each_chunk_of_each_micro_batch_runs_once_in_each_direction",
    ),
    (
        "return int(work.busy.sum()) - self.micro_batches",
        "return int(work.busy.sum())",
        "test_a_message_goes_between_stages_after_all_chunks_but_the_last",
    ),
    (
        "return not self.max_staleness",
        "return self.max_staleness is None",
        "test_synchronous_servers_need_no_ledger",
    ),
    (
        "half = length - length // 2",
        "half = length // 2",
        "test_summation_order_is_the_documented_one[1-both]",
    ),
    (
        "after.append(arrived + _chunk(part, rank, -a.direction * (number + 2), ring))",
        "after.append(arrived)",
        "test_all_reduce_equals_psum_for_any_shape[0]",
    ),
    (
        "kind = (part.dim is None, jnp.dtype(part.dtype))",
        "kind = part.dim is None",
        "test_leaves_round_trip_through_buckets",
    ),
    (
        "lost = lost.at[ranks.outer].set(sub_chunk - wire.unpack(message, sub_chunk))",
        "lost = lost.at[ranks.outer].set(jnp.zeros_like(sub_chunk))",
        "test_int8_errors_are_saved_by_the_packing_rank[1-5]",
    ),
    (
        "[d for d, x in enumerate(config) if any(x)]",
        "[]",
        "test_an_operation_along_a_dim_ends_it_and_leaves_the_others[shifted by padding]",
    ),
    (
        "if node is not None and factor is not None and factor not in eqn_relations.mixed:",
        "if node is not None and factor is not None:",
        "test_an_operation_along_a_dim_ends_it_and_leaves_the_others[cumsum]",
    ),
    (
        "return math.gcd(*self.sizes(node))",
        "return max(self.sizes(node))",
        "test_a_part_of_a_tied_dim_is_the_same_part_after_any_movement",
    ),
    (
        "return max(with_it, without, key=self.total)",
        "return with_it",
        "test_the_proposal_is_what_a_person_would_write[encoder-decoder]",
    ),
    (
        "return self.window - 1, 0 if self.causal else self.window - 1",
        "return self.window, 0 if self.causal else self.window - 1",
        "test_attention_equals_the_formula[window-float32]",
    ),
    (
        "seen = distance >= 0 if self.causal else",
        "seen = distance > 0 if self.causal else",
        "test_attention_equals_the_formula[causal-float16]",
    ),
    (
        "variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)",
        "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)",
        "test_layer_norm_equals_the_formula_far_from_zero",
    ),
    (
        "turned = (a * by.cos - b * by.sin, b * by.cos + a * by.sin)",
        "turned = (a * by.cos + b * by.sin, b * by.cos - a * by.sin)",
        "test_logits_equal_numpy_in_fp64[llama-llama_logits]",
    ),
    (
        "return (1 - s) * f / self.factor + s * f",
        "return s * f / self.factor + (1 - s) * f",
        "test_frequencies_equal_llama_3s_published_rule",
    ),
    (
        "copies = parts // math.gcd(parts, kv_heads)",
        "copies = parts",
        "test_heads_are_copied_as_often_as_it_takes_and_no_more",
    ),
    (
        "return jax.random.fold_in(jax.random.fold_in(key, step), micro)",
        "return jax.random.fold_in(key, step)",
        "test_the_keys_of_micro_batches_differ",
    ),
    (
        "return jnp.where(keep, value, selected[var]) if var in selected else value",
        "return value",
        "test_a_skipped_update_changes_nothing[nan-adam]",
    ),
    (
        ('if self.table.grads_sharded:\n            return "micro_batch"'),
        ('if False:\n            return "micro_batch"'),
        "test_bytes_of_every_role_equal_the_formula[stage2-data4-mixed]",
    ),
    (
        "multiplier = factor * unscale if self.optimizer.clipping or not unscaled else None",
        "multiplier = None",
        "test_a_users_own_optimizer_is_used_and_clipped_only_when_asked",
    ),
    (
        "activations = tuple(v for v, on in inputs if on and len(v.aval.shape) > 1)",
        "activations = tuple(v for v, on in inputs if len(v.aval.shape) > 1)",
        "test_bytes_of_a_name_are_those_that_jax_saves_for_it[gpt2]",
    ),
    (
        "train // keys.known if keys.micro else stages.split(train // keys.known)",
        "stages.split(train // keys.known)",
        "test_any_two_give_the_third_and_one_gives_accumulation_one[said0-8-batch0]",
    ),
    (
        "sign = 1 if elasticity.prefer_larger_batch else -1",
        "sign = 1",
        "test_the_elastic_table_is_the_best_candidate_of_a_plain_search",
    ),
    (
        "if divisors > record:",
        "if divisors >= record:",
        "test_the_largest_micro_batch_that_divides_is_taken",
    ),
    (
        "filling = [size for size in sizes if stages.accepts(per_rank // size)]",
        "filling = sizes",
        "test_an_elastic_batch_takes_the_largest_micro_batches_that_fill_the_stages",
    ),
    (
        'if parallel.ring_wire == "int8" and zero.stage == 3',
        'if parallel.ring_wire == "int8" and zero.stage == 4',
        "test_a_bad_config_names_its_key_and_what_would_work[int8 with nowhere for its error]",
    ),
    (
        "pad(self._samples_of(there, positions), ids >= self.samples)",
        "pad(self._samples_of(there, positions), ids > self.samples)",
        "test_a_mixture_may_hold_made_samples_beside_read_ones",
    ),
    (
        "first = step * batch_size",
        "first = 0",
        "test_each_epoch_holds_each_sample_once_and_in_an_order_of_its_own",
    ),
    (
        "return np.cumsum(begins, dtype=np.int32) + np.int32(number)",
        "return np.cumsum(begins, dtype=np.int32) + np.int32(number - 1)",
        "test_packing_is_as_written_plainly",
    ),
    (
        "apart = np.flatnonzero(spans.starts[1:] != ends[:-1]) + 1",
        "apart = np.flatnonzero(spans.starts[1:] != ends[:-1])",
        "test_documents_may_lie_anywhere_in_the_array",
    ),
    (
        "elif actual[1] != crc:",
        "elif False:",
        "test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken[3]",
    ),
    (
        'copies = size if kind == "all-gather" else 1',
        "copies = 1",
        "test_kind_axis_and_payload[all-gather-<lambda>-16384-replica]",
    ),
    (
        "product *= 1 if loop.trips is None else loop.trips",
        "product *= 1",
        "test_scans_multiply",
    ),
    (
        "bound += 1 if up else -1",
        "bound += 0",
        "test_trip_count_is_that_of_pythons_range[False-compare2-0-2-6-indices2]",
    ),
    (
        "cubes = all(size % 4 == 0 for size in self.topology)",
        "cubes = True",
        "test_which_dims_of_a_torus_are_closed[v5p:2x2x4-closed1]",
    ),
    (
        "if node < 1 or (count % node and count > node):",
        "if node < 1:",
        "test_a_mistake_is_reported_with_what_would_work[h100:64/7]",
    ),
    (
        "within = math.prod(shape) <= 2 and all(size == 1 for size in shape[2:])",
        "within = True",
        "test_a_mistake_is_reported_with_what_would_work[v5p:4x4]",
    ),
    (
        "if any(parts[d] > 1 for d in inner) or old[first] % outer or new[place] % outer:",
        "if any(parts[d] > 1 for d in inner):",
        "test_which_reshapes_are_views[old5-0-new5-None]",
    ),
    (
        "outermost = [s for s in chosen if not serials & set(s.chain)]",
        "outermost = list(chosen)",
        "test_units_are_found_and_change_no_number[UnlikeBlocks]",
    ),
    (
        'trips, manual = params["length"] if name == "scan" else 1, _manual_axes(params)',
        "trips, manual = 1, _manual_axes(params)",
        "test_gradients_equal_plain_jax[pure functions, scanned]",
    ),
    (
        "return 2 * math.prod(result) * math.prod(operands[1]) // features",
        "return 2 * math.prod(result) * math.prod(operands[1])",
        "test_products_and_convolutions_are_counted_as_xla_counts_them[<lambda>-shapes3]",
    ),
    (
        "body.trips * math.prod(n for _, n in body.manual) * program_flops(body.jaxpr, count)",
        "math.prod(n for _, n in body.manual) * program_flops(body.jaxpr, count)",
        "test_the_formula_is_three_forward_passes_of_the_traced_model[gpt2-sizes0]",
    ),
    (
        "_Transfer(kind, node, sent, runs, scope, op)",
        "_Transfer(kind, node, sent, 1, scope, op)",
        "test_a_loop_over_layers_moves_each_once_and_a_device_its_shard",
    ),
    (
        "best = max(best, self.moves, key=lambda moves: sum(map(self._bytes, moves)))",
        "best = self.moves",
        "test_of_branches_the_one_that_transfers_most_counts",
    ),
    (
        "purpose = GRADIENTS if move.node in self.gradients else ACTIVATIONS",
        "purpose = ACTIVATIONS",
        "test_what_reaches_the_next_state_by_itself_is_a_gradient_and_else_an_activation",
    ),
    (
        "last = end if is_output else max(times[i] for i in by - {OUT})",
        "last = end",
        "test_full_recompute_saves_the_inputs_of_the_blocks",
    ),
    (
        "return unpad(master.astype(row.param.dtype), row.shape(row.param))",
        "return unpad(master, row.shape(row.param))",
        "test_each_device_holds_what_a_fresh_state_would[bf16 with masters]",
    ),
    (
        'return 2 if kind == "all-reduce" else 1',
        "return 1",
        "test_ring_volume_is_what_a_ring_sends[2-all-reduce]",
    ),
    (
        "total = sum(self._weights)\n",
        "total = 1.0\n",
        "test_an_epoch_of_a_mixture_ends_where_its_first_part_is_through",
    ),
    (
        'return max(within, across) if chip.platform == "cuda" else within + across',
        "return within + across",
        "test_over_nodes_each_device_sends_its_part_of_the_node",
    ),
    (
        "numbered = [info for info in infos if step_of(info.tag) is not None]",
        "numbered = list(infos)",
        "test_checkpoints_with_tags_of_their_own_stay",
    ),
    (
        "old = [info.tag for info in numbered[: complete[-keep]]]",
        "old = [info.tag for info in numbered[: complete[-1]]]",
        "test_the_newest_and_those_at_intervals_are_retained",
    ),
    (
        ("if now > units_free:\n                        idle.append((units_free, now))"),
        ("if now > units_free + 1e9:\n                        idle.append((units_free, now))"),
        "test_an_operation_waits_for_the_communication_that_it_reads",
    ),
    (
        "return [x if of_samples or not axes else self._sum(x, axes) for x, of_samples in pairs]",
        "return list(found)",
        "test_unlike_stages_train_as_plain_optax[encoder-decoder, data, stage 1]",
    ),
    (
        "        sent,\n        weights,\n",
        "        sent,\n        jnp.ones_like(weights),\n",
        "test_renormalized_scores_that_underflow_have_weights_and_gradients[softmax]",
    ),
    (
        "    sent = chosen\n",
        "    sent = (chosen + 1) % experts\n",
        "test_of_equal_scores_the_lowest_experts_are_chosen",
    ),
    (
        'if renormalize or scores == "softmax_of_top":',
        'if scores == "softmax_of_top":',
        "test_renormalized_scores_that_underflow_have_weights_and_gradients[sigmoid]",
    ),
    (
        "best = _largest(jnp.sum(jnp.where(counted, grouped, 0), axis=-1), limited)",
        "best = _largest(jnp.sum(jnp.where(counted, grouped, 0), axis=-1), limited + 1)",
        "test_a_group_that_is_not_chosen_has_no_expert_even_where_scores_are_negative",
    ),
    (
        "taken = of_chosen(order) <= capacity",
        "taken = of_chosen(order) < capacity",
        "test_an_expert_takes_its_first_tokens_of_each_sample",
    ),
    (
        "jnp.where(counts == quotient, rest, quotient - counts)",
        "quotient - counts",
        "test_experts_with_the_mean_keep_their_bias_and_layers_are_apart",
    ),
    (
        "logits = checkpoint_name(logits, LOGITS)",
        "logits = checkpoint_name(logits, DECISION)",
        "test_a_router_whose_logits_are_not_finite_is_named[Mixture-Scanned]",
    ),
    (
        "always = [DECISION] if any(",
        "always = [] if any(",
        "test_nothing_is_chosen_again[full-0]",
    ),
    (
        ".isdisjoint(mixed) or writes_along(eqn, relations, reads[0])",
        ".isdisjoint(mixed)",
        "test_a_loss_that_once_was_wrong_is_right[written in tiles]",
    ),
    (
        "raise MixesTokensError(name)",
        "pass",
        "test_a_loss_that_once_was_wrong_is_right[derivative in tiles]",
    ),
    (
        'if name != "dynamic_update_slice" and name not in SCATTERS:',
        "if name not in SCATTERS:",
        "test_a_loss_that_once_was_wrong_is_right[sample written]",
    ),
    (
        "return self._with_derivative(eqn, twin, operands, values)",
        "return values",
        "test_a_loss_that_once_was_wrong_is_right[derivative of samples]",
    ),
    (
        "(batch_size // parts, batch_size) if divides else (batch_size, 2 * batch_size)",
        "(batch_size, 2 * batch_size)",
        "test_a_loss_that_once_was_wrong_is_right[number of samples]",
    ),
    (
        "return added, Share(new_unit / unit, ",
        "return added, Share(per_weight(new.weight, weight), ",
        "test_a_loss_that_once_was_wrong_is_right[part without weight]",
    ),
    (
        "return replace(differentiated, weight_parameters=paths)",
        "return program",
        "test_a_loss_that_once_was_wrong_is_right[trained weight]",
    ),
    (
        "computed_arrays, adapters=not reference, once=once",
        "computed_arrays, once=once",
        "test_the_reference_is_the_base_without_adapters[ZeRO 3]",
    ),
    (
        '"temperature": float(temperature),',
        '"temperature": 1.0,',
        "test_they_are_those_of_the_logits[pipe 2, ZeRO 1]",
    ),
    (
        "c.of_pairs(PAIR_LOSSES[name](pairs, o)), c.pairs, weight",
        "c.of_pairs(PAIR_LOSSES[name](pairs, o)), c.pairs / c.pairs.sum(), weight",
        "test_a_step_of_preferences_equals_plain_optax[mixed-stage 3, accumulation 4]",
    ),
    (
        "rows = pair_rows(batch, pairs_per_row)",
        'rows = pair_rows({**batch, "mask": of_texts(batch)}, pairs_per_row)',
        "test_a_step_of_preferences_equals_plain_optax[mixed-stage 3, accumulation 4]",
    ),
    (
        'adapters = entry.model != "reference" or entry.once or _has_first_adapter(program)',
        "adapters = True",
        "test_a_step_of_preferences_equals_plain_optax[kto-adapters]",
    ),
    (
        "mean = total / jnp.maximum(records, 1)",
        "mean = total / len(batch[MISMATCHED])",
        "test_a_step_of_preferences_equals_plain_optax[kto-pipe 2]",
    ),
    (
        "return train and (objective is None or objective.dropout)",
        "return train",
        "test_dropout_acts_only_where_it_is_not_disabled[False]",
    ),
    (
        'row["mask"][targets] = np.arange(1, len(tokens)) >= prompt',
        'row["mask"][targets] = 1',
        "test_texts_of_pairs_end_with_the_end_token_and_the_mask_is_of_the_completion",
    ),
    (
        "prompts = np.repeat(prompts.min(axis=1, keepdims=True), count, axis=1)",
        "pass",
        "test_a_completion_begins_where_the_tokens_diverge_the_same_on_both_sides",
    ),
    (
        "over = np.maximum(lengths.sum(axis=-1) - size, 0)",
        "over = np.maximum(lengths.sum(axis=-1) - size, 0).max(axis=1, keepdims=True)",
        "test_each_side_is_truncated_by_itself_to_seq_len_plus_one[end-chosen0]",
    ),
    (
        "partners[firsts] = np.append(firsts[1:], count) - 1",
        "pass",
        "test_each_labelled_completion_has_the_one_before_it_in_its_block",
    ),
    (
        "if (left := room - length) and len(bins[chosen]) != most:",
        "if left := room - length:",
        "test_each_pair_is_in_one_row_with_its_sides_truncated",
    ),
    (
        "for name, array in sorted((values or {}).items()):",
        "for name, array in ():",
        "test_the_fingerprint_covers_labels_margins_and_the_objectives_keys",
    ),
    (
        "if unlike := [name for name in now if before.get(name) != now[name]]:",
        "if unlike := list[str]():",
        "test_arrays_of_other_data_weights_or_settings_are_not_used[precision]",
    ),
    (
        "program.storage.placed(average, onto_disk=False)",
        "program.storage.placed(average)",
        "test_averages_as_parameters_leave_the_masters_as_they_are",
    ),
    (
        "self._file.refuse_changed()",
        "pass",
        "test_a_file_that_was_changed_is_neither_saved_nor_read",
    ),
    (
        "            self.refuse_other(step)\n            return stack",
        "            return stack",
        "test_an_interrupted_step_is_neither_saved_nor_continued_from",
    ),
    (
        "            wait(self._chunks)",
        "            pass",
        "test_an_interrupted_wait_ends_after_the_transfer",
    ),
    (
        "(start + rows.start, start + rows.start + rows.count)",
        "(start, start + rows.count)",
        "test_a_run_resumes_bitwise_from_a_save_beside_the_next_step",
    ),
]
