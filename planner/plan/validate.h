#pragma once
// The checks behind Validate (planner/plan/plan.h), with the graph's lookups
// made beforehand: for callers that validate many plans of one graph.

#include <span>
#include <vector>

#include "planner/base/result.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

// As Validate(*index.graph, cluster, plan). A plan that was made for a cluster
// of another name is not an error: what counts is that its devices exist.
std::vector<Error> Validate(const GraphIndex& index, const Cluster& cluster,
                            const Plan& plan);

// Whether there are none, but for weights with a ZeRO stage that have no axes
// where they could; a broken plan shows it sooner.
bool IsValid(const GraphIndex& index, const Cluster& cluster, const Plan& plan);

// Whether a plan is valid that differs from a valid one in the placements of
// `nodes` and `weights`, in buckets and prefetch alone, which are all that is
// looked at. REQUIRES: `weights` has those, too, that `nodes` of other axes,
// tiles or groups read. Groups and chunks are what they were, or the nodes are
// whole blocks of a plan whose stages have one group each: then no position is
// left empty, and SendsForward holds for the edges of the blocks.
bool StaysValid(const GraphIndex& index, const Cluster& cluster,
                const Plan& plan, std::span<const NodeId> nodes,
                std::span<const size_t> weights);

// The same of one that differs in schedule, microbatches and zigzag alone.
// REQUIRES: `shape` is ShapeOf the plan.
bool FieldsAreValid(const GraphIndex& index, const Cluster& cluster,
                    const Plan& plan, const PipelineShape& shape);

// Whether edges between blocks lead to the same or to later positions of the
// pipeline, and within a stage where they are of what is computed once a step.
// REQUIRES: each stage has one group.
bool SendsForward(const GraphIndex& index, const Plan& plan,
                  std::span<const GraphIndex::BlockEdge> edges);

}  // namespace tessera
