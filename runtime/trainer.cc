#include "runtime/trainer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <thread>
#include <type_traits>

#include "planner/base/rng.h"
#include "planner/lower/fingerprint.h"
#include "runtime/checkpoint.h"
#include "runtime/comm/host_messages.h"
#include "runtime/device/process_memory.h"
#include "runtime/loss_scale.h"
#include "runtime/product_choices.h"
#include "runtime/train_state.h"

namespace tessera {
namespace {

// What a rank knows of the loss scale: all that know it know the same.
struct ScaleOfRank {
  LossScale state;
  int64_t known = 0;
};

// What ranks tell each other after every step.
struct Outcome {
  double loss = 0;  // of the rank that has it
  int64_t picoseconds = 0;
  int64_t stop = 0;
  int64_t untold = 0;   // whether TrainingJob::progress has failed
  int64_t untuned = 0;  // products
  ScaleOfRank scale;    // behind the step
};

// A rank's report: this on all ranks, then its spans on rank 0.
struct ReportHeader {
  MemoryUse memory;
  MemoryUse host_memory;
  FileUse file;
  Bytes os_peak;
  int64_t step_picoseconds = 0;
  int64_t spans = 0;
};
static_assert(std::is_trivially_copyable_v<Span> &&
              std::is_trivially_copyable_v<ReportHeader>);

// REQUIRES: this rank is in the loss's group.
double LossOf(const RankExecutor& executor) {
  const ValueId loss = executor.tasks().loss;
  const DType dtype = executor.tasks().value(loss).dtype;
  if (dtype == DType::kFloat64) {
    double value = 0;
    executor.device().Read(&value, executor.data(loss), {sizeof(value)});
    return value;
  }
  float value = 0;
  executor.device().Read(&value, executor.data(loss), {sizeof(value)});
  return value;
}

// The index of the (lower) median, without the first of several.
size_t MedianIndex(const std::vector<Duration>& times) {
  std::vector<size_t> order(times.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (order.size() > 1) order.erase(order.begin());
  const auto middle =
      order.begin() + static_cast<int64_t>(order.size() - 1) / 2;
  std::nth_element(order.begin(), middle, order.end(), [&](size_t a, size_t b) {
    return times[a] != times[b] ? times[a] < times[b] : a < b;
  });
  return *middle;
}

// This rank's state of the loss scale; none where it has none.
ValueId ScaleValueOf(const RankExecutor& executor) {
  const std::vector<Value>& values = executor.tasks().values;
  for (size_t v = 0; v < values.size(); ++v) {
    if (values[v].persistent && values[v].what == "loss scale" &&
        executor.Holds(ValueId(v))) {
      return ValueId(v);
    }
  }
  return ValueId();
}

class Trainer {
 public:
  Trainer(const TrainingJob& job, RankExecutor& executor, Communicator& all,
          Bytes resident_before)
      : job_(job),
        executor_(executor),
        all_(all),
        messages_(executor.device(), all),
        tuner_(job.tune ? job.device->product_tuner() : nullptr),
        scale_value_(ScaleValueOf(executor)),
        resident_before_(resident_before) {
    if (job.learning_rate) {
      learning_rate_ = *job.learning_rate;
    } else {
      learning_rate_.peak = job.options.learning_rate;
    }
  }

  Result<TrainingResult> Run() {
    TESSERA_RETURN_IF_ERROR(Start());
    for (int64_t i = 0; i < job_.steps && !stops_; ++i) {
      TESSERA_RETURN_IF_ERROR(Step());
      const bool last = i + 1 == job_.steps || stops_;
      const bool due =
          job_.save_every > 0 && executor_.step() % job_.save_every == 0;
      if (!job_.save_path.empty() && (last || due)) {
        Begin("saving of the checkpoint");
        TESSERA_TRY(const bool finite,
                    SaveCheckpoint(job_.save_path, *job_.graph, job_.seed,
                                   executor_, all_, job_.keep_checkpoints));
        if (finite) summary_.saved = executor_.step();
      }
    }
    if (!job_.export_folder.empty()) {
      Begin("export of weights");
      TESSERA_TRY(summary_.exported,
                  SaveWeights({job_.export_folder, job_.layout,
                               job_.graph->dtype, job_.export_file_bytes,
                               summary_.interrupted ? nullptr : job_.stop},
                              *job_.graph, executor_, all_));
    }
    TESSERA_RETURN_IF_ERROR(Report());
    return std::move(summary_);
  }

 private:
  // Of what is no task of a step.
  void Begin(std::string_view what) { executor_.world().SetCurrentTask(what); }

  Result<void> Start() {
    StartUp start;
    start.stop = job_.stop;
    if (all_.rank() == 0) start.progress = job_.starting;
    Begin(job_.load_path.empty() ? "setting of the first weights"
                                 : "loading of the checkpoint");
    const auto begun =
        job_.load_path.empty()
            ? InitialiseState(*job_.graph, job_.seed, executor_, start)
            : LoadCheckpoint(job_.load_path, job_.layout, *job_.graph,
                             executor_, start);
    if (!begun && begun.error().code != ErrorCode::kInterrupted) return begun;
    // There is no step yet that an interrupt would have to wait for.
    Begin("");
    TESSERA_RETURN_IF_ERROR(AgreeToGoOn());
    summary_.first_step = executor_.step();
    if (learning_rate_.steps == 0) {
      learning_rate_.steps = executor_.step() + job_.steps;
    }
    if (job_.validation.every > 0) {
      loss_tasks_ = LossOnly(*job_.tasks);
      TESSERA_TRY(validator_,
                  RankExecutor::CreateForLoss(loss_tasks_, executor_,
                                              job_.validation.load));
      validator_->set_places_are_positions(job_.places_are_positions);
    }
    return {};
  }

  // kInterrupted on all ranks where one is to stop; an error where they have
  // loaded states of different steps.
  Result<void> AgreeToGoOn() {
    struct Progress {
      int64_t stop = 0;
      int64_t step = 0;
      int64_t samples = 0;
      ScaleOfRank scale;
    };
    TESSERA_TRY(const ScaleOfRank scale, ReadScale());
    const Progress mine = {job_.stop != nullptr && job_.stop->load() ? 1 : 0,
                           executor_.step(), executor_.samples(), scale};
    std::vector<Progress> begins(static_cast<size_t>(all_.size()));
    TESSERA_RETURN_IF_ERROR(
        messages_.AllGather(&mine, sizeof(mine), begins.data()));
    if (std::ranges::any_of(
            begins, [](const Progress& one) { return one.stop != 0; })) {
      TESSERA_RETURN_IF_ERROR(executor_.world().Flush());
      return Error{ErrorCode::kInterrupted, "interrupted before the first step",
                   ""};
    }
    for (size_t rank = 1; rank < begins.size(); ++rank) {
      if (begins[rank].step == begins[0].step &&
          begins[rank].samples == begins[0].samples) {
        continue;
      }
      return InvalidInput(
          "rank " + std::to_string(rank) + " begins behind step " +
              std::to_string(begins[rank].step) + " and rank 0 behind step " +
              std::to_string(begins[0].step) +
              ": they have read different checkpoints",
          job_.load_path);
    }
    if (job_.load_step && executor_.step() != *job_.load_step) {
      return Error{ErrorCode::kUnavailable,
                   "is of step " + std::to_string(executor_.step()) +
                       " now, and was of step " +
                       std::to_string(*job_.load_step) +
                       " when this run began: another run has replaced it",
                   job_.load_path};
    }
    for (const Progress& one : begins) {
      if (one.scale.known != 0) scale_ = one.scale.state;
    }
    return {};
  }

  Result<void> Step() {
    const int64_t step = executor_.step();
    const double rate = RateAt(learning_rate_, step);
    executor_.set_learning_rate(rate);
    const bool has_timeline = !executor_.Replays();
    TESSERA_TRY(Timeline timeline, executor_.Run(*job_.tasks));

    const auto ranks = static_cast<size_t>(all_.size());
    const auto self = static_cast<size_t>(all_.rank());
    const size_t loss_rank = LossRank();
    std::vector<Outcome> outcomes(ranks);
    Outcome& mine = outcomes[self];
    if (self == loss_rank) mine.loss = LossOf(executor_);
    mine.picoseconds = timeline.step_time.picoseconds;
    mine.stop = job_.stop != nullptr && job_.stop->load() ? 1 : 0;
    mine.untold = summary_.untold ? 1 : 0;
    std::vector<MatMulKey> untuned;
    if (tuner_ != nullptr) untuned = tuner_->TakeUntuned();
    mine.untuned = std::ssize(untuned);
    TESSERA_TRY(mine.scale, ReadScale());
    const Outcome sent = mine;
    TESSERA_RETURN_IF_ERROR(
        messages_.AllGather(&sent, sizeof(Outcome), outcomes.data()));

    StepReport report;
    report.step = step;
    report.learning_rate = rate;
    report.loss = outcomes[loss_rank].loss;
    bool tunes = false;
    for (const Outcome& outcome : outcomes) {
      tunes = tunes || outcome.untuned > 0;
      report.step_time = Max(report.step_time, {outcome.picoseconds});
      summary_.interrupted = summary_.interrupted || outcome.stop != 0;
      stops_ = stops_ || outcome.stop != 0 || outcome.untold != 0;
    }
    ReportScale(outcomes, report);
    report.tokens_per_s = TokensPerSecond(report.step_time);
    summary_.losses.push_back(report.loss);
    summary_.step_times.push_back(report.step_time);
    if (has_timeline) {
      kept_.push_back({report.step_time, std::move(timeline)});
      if (kept_.size() > KeptTimelines(job_.tasks->tasks.size())) {
        kept_.pop_front();
      }
    }
    if (tunes && !stops_) {
      Begin("timing of products");
      TESSERA_RETURN_IF_ERROR(AgreeOnProducts(untuned, *tuner_, messages_));
    }
    if (validator_ != nullptr && (step + 1) % job_.validation.every == 0) {
      TESSERA_TRY(report.validation_loss, Validate());
      summary_.validation_loss = report.validation_loss;
    }
    if (self == 0 && job_.progress) {
      auto told = job_.progress(report);
      // The others learn of it in the next step.
      if (!told && !summary_.untold) summary_.untold = told.error();
    }
    return {};
  }

  Result<ScaleOfRank> ReadScale() const {
    ScaleOfRank scale;
    if (!scale_value_.valid()) return scale;
    TESSERA_RETURN_IF_ERROR(executor_.ReadValue(scale_value_, &scale.state));
    scale.known = 1;
    return scale;
  }

  void ReportScale(const std::vector<Outcome>& outcomes, StepReport& report) {
    const auto one = std::ranges::find_if(
        outcomes, [](const Outcome& of) { return of.scale.known != 0; });
    if (one == outcomes.end()) return;
    const LossScale behind = one->scale.state;
    report.loss_scale = scale_.scale;
    report.skipped = behind.skipped_steps > scale_.skipped_steps;
    summary_.loss_scales.push_back(scale_.scale);
    if (report.skipped) summary_.skipped_steps.push_back(report.step);
    scale_ = behind;
  }

  Result<double> Validate() {
    double sum = 0;
    int64_t labels = 0;
    for (int64_t i = 0; i < job_.validation.batches; ++i) {
      validator_->set_progress(0, i * job_.graph->global_batch);
      if (auto done = validator_->Run(loss_tasks_); !done) {
        return done.error().At("validation");
      }
      Begin("validation");
      double loss = 0;
      const auto rank = static_cast<int>(LossRank());
      if (all_.rank() == rank) loss = LossOf(*validator_);
      TESSERA_RETURN_IF_ERROR(messages_.Broadcast(&loss, sizeof(loss), rank));
      if (i == std::ssize(validation_labels_)) {
        TESSERA_TRY(const int64_t counted, job_.validation.labels(i));
        validation_labels_.push_back(counted);
      }
      const int64_t counted = validation_labels_[static_cast<size_t>(i)];
      sum += loss * static_cast<double>(counted);
      labels += counted;
    }
    return labels > 0 ? sum / static_cast<double>(labels) : 0;
  }

  size_t LossRank() const {
    const Value& loss = job_.tasks->value(job_.tasks->loss);
    return job_.tasks->group(loss.group).devices[0].index();
  }

  double TokensPerSecond(Duration step_time) const {
    const auto tokens =
        static_cast<double>(job_.graph->global_batch * job_.graph->seq_len);
    return step_time.picoseconds > 0 ? tokens / step_time.seconds() : 0;
  }

  // Gathers what only rank 0 reports.
  Result<void> Report() {
    if (summary_.losses.empty()) return {};
    const std::vector<Duration>& times = summary_.step_times;
    const Duration median = times[MedianIndex(times)];
    summary_.step_time = median;
    summary_.graphs = executor_.graph_use();
    if (tuner_ != nullptr) summary_.products = tuner_->Choices();
    summary_.tokens_per_s = TokensPerSecond(median);

    // The median step of those whose timelines are still there. All ranks know
    // the same times, and replay the same steps (CheckTerms), so they choose
    // the same one.
    std::vector<Duration> kept;
    for (const auto& [time, of_step] : kept_) kept.push_back(time);
    const Timeline& timeline = kept_[MedianIndex(kept)].second;
    ReportHeader header;
    header.memory = executor_.device().account().peak();
    header.host_memory = executor_.host_peak();
    if (const FileTier* const file = executor_.file()) {
      header.file = {file->length(), file->direct(), file->has_ring()};
    }
    header.os_peak = PeakResidentBytes() - resident_before_;
    header.step_picoseconds = timeline.step_time.picoseconds;
    header.spans = static_cast<int64_t>(timeline.spans.size());
    std::vector<ReportHeader> headers(static_cast<size_t>(all_.size()));
    TESSERA_RETURN_IF_ERROR(
        messages_.AllGather(&header, sizeof(header), headers.data()));
    for (int rank = 0; rank < all_.size(); ++rank) {
      const ReportHeader& theirs = headers[static_cast<size_t>(rank)];
      Timeline received;
      received.step_time = {theirs.step_picoseconds};
      if (all_.rank() == 0) {
        received.spans.resize(static_cast<size_t>(theirs.spans));
      }
      TESSERA_RETURN_IF_ERROR(messages_.ToRankZero(
          rank, timeline.spans.data(), received.spans.data(),
          theirs.spans * static_cast<int64_t>(sizeof(Span))));
      if (all_.rank() != 0) continue;
      summary_.memory.push_back(theirs.memory);
      summary_.host_memory.push_back(theirs.host_memory);
      summary_.files.push_back(theirs.file);
      summary_.os_peak.push_back(theirs.os_peak);
      summary_.timelines.push_back(std::move(received));
    }
    return executor_.world().Flush();
  }

  const TrainingJob& job_;
  RankExecutor& executor_;
  Communicator& all_;
  HostMessages messages_;
  ProductTuner* const tuner_;  // null: products are not timed
  const ValueId scale_value_;
  const Bytes resident_before_;
  LearningRate learning_rate_;
  TaskGraph loss_tasks_;
  std::unique_ptr<RankExecutor> validator_;  // null: no validation
  std::vector<int64_t> validation_labels_;   // by batch, of those seen so far
  LossScale scale_;  // of the next step, where the loss is scaled
  TrainingResult summary_;
  bool stops_ = false;  // behind the step that is under way, on all ranks
  // Of the last steps whose tasks have times.
  std::deque<std::pair<Duration, Timeline>> kept_;
};

// What all ranks of a job have in common, where they were started apart.
struct Terms {
  static constexpr std::array<const char*, 15> kNames = {
      "seed (--seed)",
      "number of steps (--steps)",
      "optimizer (--optimizer)",
      "clipping, weight decay, betas or epsilon (--clip, --weight-decay, "
      "--betas, --epsilon)",
      "rounding (--stochastic-rounding)",
      "learning rate (--lr, --warmup, --decay, --min-lr, --decay-steps)",
      "model or plan",
      "data (--data, --end-of-text, --mask-token)",
      "validation (--validate-every, --validate-batches)",
      "interval, number or file of checkpoints (--save, --save-every, "
      "--keep-checkpoints)",
      "export (--export, --export-shard)",
      "start (--load)",
      "GPU, cuBLASLt or use of --tune",
      "use of graphs (--graph)",
      "kernels (--deterministic, --compare, --learn, --trace, --profile)"};
  std::array<uint64_t, kNames.size()> values = {};
};

Terms TermsOf(const TrainingJob& job) {
  const auto mix = [](uint64_t& hash, auto value) {
    if constexpr (std::is_same_v<decltype(value), double>) {
      hash = Mix64(hash ^ std::bit_cast<uint64_t>(value));
    } else {
      hash = Mix64(hash ^ static_cast<uint64_t>(value));
    }
  };
  uint64_t optimizer = 0;
  for (char c : job.options.optimizer) mix(optimizer, c);
  uint64_t options = 0;
  for (double value :
       {job.options.clip, job.options.beta1, job.options.beta2,
        job.options.epsilon, job.options.weight_decay, job.options.beta2_decay,
        job.options.epsilon1.value_or(-1), job.options.epsilon2,
        job.options.d}) {
    mix(options, value);
  }
  uint64_t rate = 0;
  mix(rate, job.options.learning_rate);
  if (job.learning_rate) {
    const LearningRate& given = *job.learning_rate;
    if (given.decay != nullptr) {
      for (char c : given.decay->name) mix(rate, c);
    }
    mix(rate, given.peak);
    mix(rate, given.least);
    mix(rate, given.warmup);
    mix(rate, given.steps);
  }
  uint64_t work = 0;
  for (char c : Fingerprint(*job.graph)) mix(work, c);
  mix(work, Fingerprint(*job.tasks));
  uint64_t validation = 0;
  mix(validation, job.validation.every);
  if (job.validation.every > 0) mix(validation, job.validation.batches);
  uint64_t saves = 0;
  mix(saves, job.save_every);
  mix(saves, job.keep_checkpoints);
  mix(saves, job.save_path.empty());
  uint64_t exports = 0;
  mix(exports, job.export_folder.empty());
  mix(exports, job.export_file_bytes.value);
  uint64_t products = 0;
  if (job.tune) {
    mix(products, 1);
    if (const ProductTuner* const tuner = job.device->product_tuner()) {
      for (char c : tuner->Maker()) mix(products, c);
    }
  }
  // Those that fuse, or sum, otherwise give other bits.
  uint64_t kernels = 0;
  mix(kernels, job.fuses);
  mix(kernels, job.deterministic);
  return {{job.seed, static_cast<uint64_t>(job.steps), optimizer, options,
           job.options.stochastic_rounding, rate, work, job.data, validation,
           saves, exports, job.load_path.empty(), products, job.graphs,
           kernels}};
}

Result<void> CheckTerms(const TrainingJob& job, HostMessages all) {
  const Terms mine = TermsOf(job);
  std::vector<Terms> terms(static_cast<size_t>(all.size()));
  TESSERA_RETURN_IF_ERROR(all.AllGather(&mine, sizeof(mine), terms.data()));
  for (size_t rank = 1; rank < terms.size(); ++rank) {
    for (size_t i = 0; i < mine.values.size(); ++i) {
      if (terms[rank].values[i] == terms[0].values[i]) continue;
      return InvalidInput("rank " + std::to_string(rank) +
                          " was started with another " + Terms::kNames[i] +
                          " than rank 0");
    }
  }
  return {};
}

Result<TrainingResult> TrainOrFail(const TrainingJob& job) {
  std::vector<int> everyone(static_cast<size_t>(job.world->world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  TESSERA_TRY(Communicator* const all, job.world->Group(everyone));
  TESSERA_RETURN_IF_ERROR(CheckTerms(job, {*job.device, *all}));
  ProductTuner* const tuner = job.device->product_tuner();
  if (job.tune && tuner != nullptr) {
    TESSERA_RETURN_IF_ERROR(ShareProducts(job.products, job.products_path,
                                          *tuner, {*job.device, *all}));
  }
  job.device->set_fuses(job.fuses);
  ResetPeakResident();
  const Bytes resident_before = ResidentBytes();
  TESSERA_TRY(const auto executor,
              RankExecutor::Create(*job.tasks, *job.graph, job.options,
                                   job.seed, *job.world, *job.device, job.load,
                                   {.directory = job.offload_directory}));
  executor->set_places_are_positions(job.places_are_positions);
  executor->set_deterministic(job.deterministic);
  if (job.graphs) TESSERA_RETURN_IF_ERROR(executor->UseGraphs());
  return Trainer(job, *executor, *all, resident_before).Run();
}

}  // namespace

size_t KeptTimelines(size_t tasks) {
  // Choices: of so few steps one is still like most; so many spans have 10 MB.
  constexpr size_t kLeast = 9;
  constexpr size_t kMost = 65;
  constexpr size_t kSpans = size_t{1} << 18;
  return std::clamp(kSpans / std::max<size_t>(1, tasks), kLeast, kMost);
}

Result<TrainingResult> Train(const TrainingJob& job) {
  auto result = TrainOrFail(job);
  // Peers would wait for a rank that leaves, unless they know. Where they abort
  // or die, this comes too late to change their reason.
  if (!result && result.error().code != ErrorCode::kInterrupted) {
    job.world->Abort(result.error().ToString());
  }
  return result;
}

void RunThreads(int n, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(f, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tessera
