from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0016_workers_of_completed_jobs")]

    operations = [
        migrations.AddField(
            model_name="worker",
            name="clock_ahead",
            field=models.FloatField(
                db_default=0.0,
                default=0.0,
                help_text="Seconds by which its host's clock is ahead of the database's.",
                verbose_name="clock ahead",
            ),
        ),
    ]
