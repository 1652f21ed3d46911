/* Open MPI's side of the benchmark, timed as in `ferroce collective`: back-to-back calls, each timed from the end of the
 * previous one. Every result is that of the slowest rank.
 *
 * open_mpi OPERATION MIN MAX FACTOR ITERATIONS WARMUP; rank 0 prints "BYTES MEAN_US MEDIAN_US WRONG" for each size. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int ranks, rank, is_gather;
static float *input, *output;

static void call(size_t bytes) {
    size_t count = bytes / sizeof(float);
    if (is_gather)
        MPI_Allgather(input, count / ranks, MPI_FLOAT, output, count / ranks, MPI_FLOAT, MPI_COMM_WORLD);
    else
        MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* Small integers, whose sums are exact in any order. */
static float element(int of, size_t index) { return (float)((index + 7 * of) % 31); }

static long count_wrong(size_t bytes) {
    size_t count = bytes / sizeof(float), block = count / ranks;
    long wrong = 0, all;
    for (size_t i = 0; i < (is_gather ? block * ranks : count); i++) {
        float expected = 0;
        if (is_gather)
            expected = element(i / block, i % block);
        else
            for (int of = 0; of < ranks; of++) expected += element(of, i);
        wrong += output[i] != expected;
    }
    MPI_Allreduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 7) {
        fprintf(stderr, "usage: open_mpi OPERATION MIN MAX FACTOR ITERATIONS WARMUP\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    is_gather = !strcmp(argv[1], "all_gather");
    size_t min = strtoull(argv[2], 0, 10), max = strtoull(argv[3], 0, 10), factor = strtoull(argv[4], 0, 10);
    int iterations = atoi(argv[5]), warmup = atoi(argv[6]);
    input = malloc(max);
    output = malloc(max);
    double *times = malloc((iterations + 1) * sizeof(double)), *slowest = malloc((iterations + 1) * sizeof(double));
    if (!input || !output || !times || !slowest || factor < 2) MPI_Abort(MPI_COMM_WORLD, 2);
    for (size_t i = 0; i < max / sizeof(float); i++) input[i] = element(rank, i), output[i] = -1;
    for (size_t bytes = min; bytes <= max; bytes *= factor) {
        for (int i = 0; i < warmup; i++) call(bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime(), before = start;
        for (int i = 0; i < iterations; i++) {
            call(bytes);
            double now = MPI_Wtime();
            times[i] = now - before;
            before = now;
        }
        times[iterations] = (before - start) / iterations;
        MPI_Allreduce(times, slowest, iterations + 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        double mean = slowest[iterations];
        qsort(slowest, iterations, sizeof(double), by_value);
        long wrong = count_wrong(bytes);
        if (!rank) {
            printf("%zu %.3f %.3f %ld\n", bytes, mean * 1e6, slowest[iterations / 2] * 1e6, wrong);
            fflush(stdout);
        }
    }
    MPI_Finalize();
    return 0;
}
