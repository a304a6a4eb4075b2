from branchwise.cli import main

main()
