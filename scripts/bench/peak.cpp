// Multiplies and adds vectors of 16 floats in registers, on all threads: twelve chains, more than two
// units of four cycles need. Prints the largest number of GFLOP/s that any of some rounds reached.
#include <omp.h>

#include <chrono>
#include <cstdio>

typedef float Floats __attribute__((vector_size(64)));
constexpr int CHAINS = 12, ROUNDS = 1500;
constexpr long TURNS = 50000;

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main() {
    double shortest = 1e9;
    float kept = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const double begin = now();
#pragma omp parallel reduction(+ : kept)
        {
            Floats chains[CHAINS];
            for (int i = 0; i < CHAINS; i++) chains[i] = 0.1f * i - Floats{};
            const Floats factor = 0.999999f - Floats{}, added = 1e-7f - Floats{};
            for (long turn = 0; turn < TURNS; turn++)
                for (int i = 0; i < CHAINS; i++) chains[i] = chains[i] * factor + added;
            for (int i = 0; i < CHAINS; i++) kept += chains[i][0];
        }
        const double took = now() - begin;
        shortest = took < shortest ? took : shortest;
    }
    const double operations = 2.0 * 16 * CHAINS * TURNS * omp_get_max_threads();
    printf("%.1f %g\n", operations / shortest / 1e9, kept);
}
